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

ModelKind = Literal["causal language model", "masked language model", "image classifier"]
MODEL_CLASSES: dict[ModelKind, dict[str, Any]] = {
    "causal language model": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked language model": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image classifier": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
LAYERS_KEY = "num_hidden_layers"
MOST_LAYERS = 1000
IGNORED_KEYS = ("dtype", "torch_dtype", "use_cache", "output_attentions", "output_hidden_states", "return_dict")
# The sizes of a tiny twin: narrow layers, a small vocabulary and small images.
HEADS, HEAD_WIDTH, VOCABULARY, EXPERTS, PATCH, PATCHES_A_SIDE = 4, 16, 512, 4, 8, 4
MULTIPLE = 16  # the width of an MLP in a tiny twin is a multiple of this number


class Architecture(NamedTuple):
    """A class of models in transformers that shardlab can train."""

    kind: ModelKind
    """What a model of this class is trained for."""
    model_class: Any
    """The Python class."""
    model_type: str
    """The name of the class in configurations."""


def find_architecture(config_values: dict[str, Any]) -> Architecture:
    """The class of models that a configuration names. config_values: the content of the configuration.

    Raises InputError, without the name of the file, if the configuration names no class that shardlab can train.
    """
    model_type, class_names = config_values.get("model_type"), config_values.get("architectures")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        found_text = "no model_type" if model_type is None else f"the model_type {str(model_type)[:40]!r}"
        raise InputError(f"has {found_text}. Allowed: one that transformers {transformers.__version__} knows, such as llama.")
    kind_by_class = {name: kind for kind, classes in MODEL_CLASSES.items() for name in _as_tuple(classes.get(model_type))}
    if not kind_by_class:
        raise InputError(
            f"{model_type} of transformers has no model that can be trained here. Allowed: {', '.join(MODEL_CLASSES)}."
        )
    allowed_text = ", ".join(f"{name} ({kind})" for name, kind in kind_by_class.items())
    if class_names is None and len(kind_by_class) == 1:
        class_names = list(kind_by_class)
    if not isinstance(class_names, list) or len(class_names) != 1 or class_names[0] not in kind_by_class:
        found_text = "nothing" if class_names is None else str(class_names)[:80]
        raise InputError(f"architectures: found {found_text}. Allowed for {model_type}: a list with one of {allowed_text}.")
    return Architecture(kind_by_class[class_names[0]], getattr(transformers, class_names[0]), model_type)


def shrink_to_twin(architecture: Architecture, config_values: dict[str, Any]) -> dict[str, Any]:
    """The content of the configuration of a tiny twin, which is a much smaller model of the same class. The configuration may
    be invalid for transformers, so the caller must try to build the twin."""
    changed_keys = _shrink_keys(make_config(architecture, config_values, dropout=True))
    unchanged_values = {key: value for key, value in config_values.items() if key not in changed_keys}
    for name, key_name in CONFIG_MAPPING[architecture.model_type].attribute_map.items():
        if key_name in changed_keys:
            unchanged_values.pop(name, None)  # remove the other names of the same key, so that the old value does not remain
    return unchanged_values | changed_keys


def make_config(
    architecture: Architecture, config_values: dict[str, Any], *, dropout: bool, layer_count: int | None = None
) -> Any:
    """Make the configuration object of transformers from the content of a configuration.

    dropout: whether the rates of dropout stay; if not, they are set to 0. layer_count: number of blocks to keep, from the
    first one
    on; None: all. Raises InputError, without the name of the file, if transformers refuses the configuration, or if the model
    cannot be trained here.
    """
    used_values = {key: value for key, value in config_values.items() if key not in IGNORED_KEYS}
    try:
        config = CONFIG_MAPPING[architecture.model_type].from_dict(used_values)
    except Exception as error:
        raise InputError(f"transformers refuses it: {summarize_error(error)}") from error
    if getattr(config, "sub_configs", None):
        raise InputError(
            f"{architecture.model_type} consists of several models. Allowed: one model, such as its text model alone."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{architecture.model_type} has an encoder and a decoder. Allowed: {', '.join(MODEL_CLASSES)}.")
    # Whether models of this type can be used both with a causal mask and without a mask; the key `is_decoder` decides.
    also_masked = architecture.model_type in MODEL_CLASSES["masked language model"]
    if architecture.kind == "causal language model" and also_masked and getattr(config, "is_decoder", True) is False:
        raise InputError('is_decoder: found false, so that each token sees those after it. Allowed: "is_decoder": true.')
    configured_layers = getattr(config, LAYERS_KEY, None)
    for name, value in (
        (LAYERS_KEY, configured_layers),
        *((f"depths[{stage}]", stage_depth) for stage, stage_depth in enumerate(getattr(config, "depths", None) or ())),
    ):
        if isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(f"{name}: found {value}. Allowed: up to {MOST_LAYERS}.")
    if layer_count is not None and layer_count != configured_layers:
        shorten_model(config, layer_count)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if not dropout:
        for name in list_dropout_keys(config):
            setattr(config, name, 0.0)
    return config


def list_dropout_keys(config: Any) -> list[str]:
    """The keys of a configuration whose values are rates above 0 of dropout or of other noise (jitter)."""
    config_values = config.to_dict()
    key_words = ("drop", "jitter")
    return [
        name
        for name, value in config_values.items()
        if any(word in name for word in key_words) and type(value) in (int, float) and value > 0
    ]


def shorten_model(config: Any, layer_count: int) -> None:
    """Change a configuration in place so that the model has only its first `layer_count` blocks. Lists that have one entry for
    each block are cut to the same length."""
    configured_layers = getattr(config, LAYERS_KEY)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == configured_layers:
            setattr(config, name, value[:layer_count])
    setattr(config, LAYERS_KEY, layer_count)


def build_model(architecture: Architecture, config: Any) -> nn.Module:
    """Build the model with random weights. config: the configuration object from `make_config`. Raises InputError, without the
    name of the file, if transformers cannot build the model."""
    if architecture.kind != "image classifier" and getattr(architecture.model_class, "_supports_sdpa", False):
        config._attn_implementation = unpacked_attention.register_unpacked_attention()
    try:
        return cast("nn.Module", architecture.model_class(config))
    except (MemoryError, RuntimeError):
        raise  # torch reports a lack of memory as a RuntimeError; the rank's process records this error as `oom`
    except Exception as error:
        raise InputError(f"transformers cannot build it: {summarize_error(error)}") from error


def summarize_error(error: BaseException) -> str:
    """The type and the message of an error in one line with a period, for the end of a sentence."""
    message = " ".join(str(error).split())[:200].rstrip(".")
    return f"{type(error).__name__}: {message}." if message else f"{type(error).__name__}."


def _as_tuple(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _shrink_keys(config: Any) -> dict[str, Any]:
    """The keys of a configuration that change for the tiny twin, with their new values.

    config: the configuration as an object of transformers. Keys that it does not have, or whose value is not a number, are not
    changed. The twin of an unusual model may therefore be invalid; the caller must try to build it.
    """
    changes: dict[str, Any] = {}

    def read_number(name: str) -> int:
        value = getattr(config, name, None)
        return value if type(value) is int and value > 0 else 0

    width = read_number("hidden_size")
    head_count = read_number("num_attention_heads")
    key_value_heads = read_number("num_key_value_heads")
    if width and head_count:
        twin_heads = min(head_count, HEADS)
        changes |= {"num_attention_heads": twin_heads, "hidden_size": twin_heads * HEAD_WIDTH}
        if key_value_heads:
            twin_key_value_heads = max(1, twin_heads * key_value_heads // head_count)
            changes["num_key_value_heads"] = twin_key_value_heads if twin_heads % twin_key_value_heads == 0 else twin_heads
        if read_number("head_dim"):
            changes["head_dim"] = HEAD_WIDTH
        for key in ("intermediate_size", "moe_intermediate_size"):
            if read_number(key):
                changes[key] = max(1, read_number(key) * twin_heads * HEAD_WIDTH // (width * MULTIPLE)) * MULTIPLE
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if read_number(key):
            changes[key] = min(read_number(key), EXPERTS)
    if read_number("num_experts_per_tok"):
        changes["num_experts_per_tok"] = min(read_number("num_experts_per_tok"), EXPERTS // 2)
    if read_number("vocab_size"):
        changes["vocab_size"] = min(read_number("vocab_size"), VOCABULARY)
        changes |= {
            key: 0 for key in config.to_dict() if key.endswith("_token_id") and read_number(key) >= changes["vocab_size"]
        }
    if read_number("patch_size") and read_number("image_size"):
        changes["patch_size"] = min(read_number("patch_size"), PATCH)
        changes["image_size"] = changes["patch_size"] * PATCHES_A_SIDE
    depths = getattr(config, "depths", None)
    if isinstance(depths, list):
        changes["depths"] = [min(depth, 1) if type(depth) is int else depth for depth in depths]
    renamed_changes = {config.attribute_map.get(key, key): value for key, value in changes.items()}
    return {key: value for key, value in renamed_changes.items() if hasattr(config, key)}
