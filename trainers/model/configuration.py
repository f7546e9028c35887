"""Builds a model of transformers from the content of its configuration file, with random weights. Downloads nothing.

shardlab.matrix.model_file has already checked the content; this module checks what can only be checked with transformers.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from shardlab.errors import InputError
from trainers.model import unpacked_attention

Kind = Literal["causal language model", "masked language model", "image classifier"]
CLASSES: dict[Kind, dict[str, Any]] = {
    "causal language model": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked language model": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image classifier": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
LAYERS = "num_hidden_layers"
MOST_LAYERS = 1000
IGNORED = ("dtype", "torch_dtype", "use_cache", "output_attentions", "output_hidden_states", "return_dict")
# The sizes of a tiny twin: narrow layers, a small vocabulary and small images.
HEADS, HEAD_WIDTH, VOCABULARY, EXPERTS, PATCH, PATCHES_A_SIDE = 4, 16, 512, 4, 8, 4
MULTIPLE = 16  # the width of an MLP in a tiny twin is a multiple of this number


class Architecture(NamedTuple):
    """A class of models in transformers that shardlab can train.

    kind: what a model of this class is trained for. model: the Python class. model_type: the name of the class in
    configurations.
    """

    kind: Kind
    model: Any
    model_type: str


def architecture(values: dict[str, Any]) -> Architecture:
    """The class of models that a configuration names. values: the content of the configuration.

    Raises InputError, without the name of the file, if the configuration names no class that shardlab can train.
    """
    model_type, named = values.get("model_type"), values.get("architectures")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        found = "no model_type" if model_type is None else f"the model_type {str(model_type)[:40]!r}"
        raise InputError(f"has {found}. Allowed: one that transformers {transformers.__version__} knows, such as llama.")
    known = {name: kind for kind, classes in CLASSES.items() for name in _names(classes.get(model_type))}
    if not known:
        raise InputError(f"{model_type} of transformers has no model that can be trained here. Allowed: {', '.join(CLASSES)}.")
    allowed = ", ".join(f"{name} ({kind})" for name, kind in known.items())
    if named is None and len(known) == 1:
        named = list(known)
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        found = "nothing" if named is None else str(named)[:80]
        raise InputError(f"architectures: found {found}. Allowed for {model_type}: a list with one of {allowed}.")
    return Architecture(known[named[0]], getattr(transformers, named[0]), model_type)


def twin_of(found: Architecture, values: dict[str, Any]) -> dict[str, Any]:
    """The content of the configuration of a tiny twin, which is a much smaller model of the same class. The configuration may
    be invalid for transformers, so the caller must try to build the twin."""
    changed = _shrink_keys(configured(found, values, dropout=True))
    kept = {key: value for key, value in values.items() if key not in changed}
    for name, spelled in CONFIG_MAPPING[found.model_type].attribute_map.items():
        if spelled in changed:
            kept.pop(name, None)  # remove the other names of the same key, so that the old value does not remain
    return kept | changed


def configured(found: Architecture, values: dict[str, Any], *, dropout: bool, layers: int | None = None) -> Any:
    """Make the configuration object of transformers from the content of a configuration.

    dropout: whether the rates of dropout stay; if not, they are set to 0. layers: number of blocks to keep, from the first one
    on; None: all. Raises InputError, without the name of the file, if transformers refuses the configuration, or if the model
    cannot be trained here.
    """
    kept = {key: value for key, value in values.items() if key not in IGNORED}
    try:
        made = CONFIG_MAPPING[found.model_type].from_dict(kept)
    except Exception as error:
        raise InputError(f"transformers refuses it: {one_line(error)}") from error
    if getattr(made, "sub_configs", None):
        raise InputError(f"{found.model_type} consists of several models. Allowed: one model, such as its text model alone.")
    if getattr(made, "is_encoder_decoder", False):
        raise InputError(f"{found.model_type} has an encoder and a decoder. Allowed: {', '.join(CLASSES)}.")
    # Whether models of this type can be used both with a causal mask and without a mask; the key `is_decoder` decides.
    either_way = found.model_type in CLASSES["masked language model"]
    if found.kind == "causal language model" and either_way and getattr(made, "is_decoder", True) is False:
        raise InputError('is_decoder: found false, so that each token sees those after it. Allowed: "is_decoder": true.')
    depth = getattr(made, LAYERS, None)
    for name, value in (
        (LAYERS, depth),
        *((f"depths[{at}]", one) for at, one in enumerate(getattr(made, "depths", None) or ())),
    ):
        if isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(f"{name}: found {value}. Allowed: up to {MOST_LAYERS}.")
    if layers is not None and layers != depth:
        shorten(made, layers)
    if hasattr(made, "use_cache"):
        made.use_cache = False
    if not dropout:
        for name in rates(made):
            setattr(made, name, 0.0)
    return made


def rates(made: Any) -> list[str]:
    """The keys of a configuration whose values are rates above 0 of dropout or of other noise (jitter)."""
    values = made.to_dict()
    words = ("drop", "jitter")
    return [
        name
        for name, value in values.items()
        if any(word in name for word in words) and type(value) in (int, float) and value > 0
    ]


def shorten(made: Any, layers: int) -> None:
    """Change a configuration in place so that the model has only its first `layers` blocks. Lists that have one entry for each
    block are cut to the same length."""
    depth = getattr(made, LAYERS)
    for name, value in made.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(made, name, value[:layers])
    setattr(made, LAYERS, layers)


def build(found: Architecture, made: Any) -> nn.Module:
    """Build the model with random weights. made: the configuration object from `configured`. Raises InputError, without the
    name of the file, if transformers cannot build the model."""
    if found.kind != "image classifier" and getattr(found.model, "_supports_sdpa", False):
        made._attn_implementation = unpacked_attention.register()
    try:
        return cast("nn.Module", found.model(made))
    except (MemoryError, RuntimeError):
        raise  # torch reports a lack of memory as a RuntimeError; the rank's process records this error as `oom`
    except Exception as error:
        raise InputError(f"transformers cannot build it: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The type and the message of an error in one line with a period, for the end of a sentence."""
    said = " ".join(str(error).split())[:200].rstrip(".")
    return f"{type(error).__name__}: {said}." if said else f"{type(error).__name__}."


def _names(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _shrink_keys(made: Any) -> dict[str, Any]:
    """The keys of a configuration that change for the tiny twin, with their new values.

    made: the configuration as an object of transformers. Keys that it does not have, or whose value is not a number, are not
    changed. The twin of an unusual model may therefore be invalid; the caller must try to build it.
    """
    found: dict[str, Any] = {}

    def number(name: str) -> int:
        value = getattr(made, name, None)
        return value if type(value) is int and value > 0 else 0

    width, heads, pairs = number("hidden_size"), number("num_attention_heads"), number("num_key_value_heads")
    if width and heads:
        of_twin = min(heads, HEADS)
        found |= {"num_attention_heads": of_twin, "hidden_size": of_twin * HEAD_WIDTH}
        if pairs:
            shared = max(1, of_twin * pairs // heads)
            found["num_key_value_heads"] = shared if of_twin % shared == 0 else of_twin
        if number("head_dim"):
            found["head_dim"] = HEAD_WIDTH
        for name in ("intermediate_size", "moe_intermediate_size"):
            if number(name):
                found[name] = max(1, number(name) * of_twin * HEAD_WIDTH // (width * MULTIPLE)) * MULTIPLE
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if number(name):
            found[name] = min(number(name), EXPERTS)
    if number("num_experts_per_tok"):
        found["num_experts_per_tok"] = min(number("num_experts_per_tok"), EXPERTS // 2)
    if number("vocab_size"):
        found["vocab_size"] = min(number("vocab_size"), VOCABULARY)
        found |= {name: 0 for name in made.to_dict() if name.endswith("_token_id") and number(name) >= found["vocab_size"]}
    if number("patch_size") and number("image_size"):
        found["patch_size"] = min(number("patch_size"), PATCH)
        found["image_size"] = found["patch_size"] * PATCHES_A_SIDE
    depths = getattr(made, "depths", None)
    if isinstance(depths, list):
        found["depths"] = [min(depth, 1) if type(depth) is int else depth for depth in depths]
    spelled = {made.attribute_map.get(name, name): value for name, value in found.items()}
    return {name: value for name, value in spelled.items() if hasattr(made, name)}
