"""A model that a matrix gives by its configuration, without code: `workload: {transformers: FILE}` or `{torchvision: NAME}`.

A configuration is only data. It is read here without the transformers library. It is refused if it refers to code, or to
anything else outside the file. A run contains a copy of the configuration, with sorted keys and without spaces. The digest of
this copy is a key of the cell, so that two different files with the same name are two different models.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from shardlab.errors import InputError
from shardlab.files import plugin_source
from shardlab.files.document import Document, Problem
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix import matrix_sections
from shardlab.record_types import Positive, limit_text

CONFIGURATION_SUFFIX = ".json"  # suffix of a configuration, and of its copy in a run folder
LONGEST_NAME = 40  # characters of the name of a model
MOST_DEPTH = 32  # levels of nesting
_CODE_REFUSAL = "it names Python code of another person, which is never executed"
_OTHER_FILE_REFUSAL = "what it names is not in this file, and nothing is downloaded"
# keys of a configuration, at any depth, and why they are refused unless their value is null or false
REFUSED_KEYS = {
    "auto_map": _CODE_REFUSAL,
    "trust_remote_code": _CODE_REFUSAL,
    "custom_pipelines": _CODE_REFUSAL,
    "attn_implementation": _OTHER_FILE_REFUSAL,
    "_attn_implementation": _OTHER_FILE_REFUSAL,
    "_attn_implementation_internal": _OTHER_FILE_REFUSAL,
    "experts_implementation": _OTHER_FILE_REFUSAL,
    "_experts_implementation": _OTHER_FILE_REFUSAL,
    "backbone": _OTHER_FILE_REFUSAL,
    "use_timm_backbone": _OTHER_FILE_REFUSAL,
    "use_pretrained_backbone": _OTHER_FILE_REFUSAL,
    "quantization_config": "random weights are trained, which are not quantized",
}


class ModelByConfiguration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A workload without code. Exactly one of transformers and torchvision is given."""

    transformers: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """The path of a configuration of the transformers library (config.json), within the folder of the matrix."""
    torchvision: Annotated[str, limit_text(r"^[a-z0-9_]{1,40}\Z", "up to 40 small letters, digits and _")] | None = None
    """The name of an image classifier of torchvision."""
    seq_len: Positive | None = None
    """The number of tokens of a sequence, if the model is a language model; a cell may set another value."""


class ModelFile(msgspec.Struct, frozen=True):
    """A model that a matrix file describes by its configuration."""

    name: str
    """The name of the workload."""
    path: str | None
    """The path of the configuration within the folder of the matrix file; None if torchvision defines the model."""
    origin: str
    """The path of the configuration, or `torchvision: NAME`, as errors and plans name the model."""
    content: bytes
    """The content of the file that a run contains."""
    seq_len: int | None
    """The tokens of a sequence; None: not given."""

    @property
    def source(self) -> PluginSource:
        """The file with the configuration of this model that a run contains, as the source of a plug-in."""
        return PluginSource(Path(self.name + CONFIGURATION_SUFFIX), {self.name + CONFIGURATION_SUFFIX: self.content})


def replace_models(document: Document, sections: dict[str, Any], folder: Path, problems: list[Problem]) -> dict[str, ModelFile]:
    """Find the models that a matrix file gives by their configuration. Returns these models by name.

    document: the matrix file. sections: its `defaults`, `axes`, `zip`, `include` and `exclude`; each model in them is replaced
    by its name. folder: the folder of the matrix file. problems: a problem is appended for each model that cannot be read.
    """
    model_by_name: dict[str, ModelFile] = {}
    for value_container, list_key, value_path in matrix_sections.find_values(sections, "workload"):
        if not isinstance(value_container[list_key], dict) or "command" in value_container[list_key]:
            continue
        try:
            model = read_model(msgspec.convert(value_container[list_key], ModelByConfiguration), folder)
            if model_by_name.setdefault(model.name, model) != model:
                raise InputError(
                    f"found two models with the name {model.name}. Allowed: one content of the file and one seq_len for each "
                    "name; the key seq_len of a cell, which may be an axis, changes the length of sequences."
                )
        except InputError as error:
            problems.append(document.problem(value_path, str(error)))
            continue
        value_container[list_key] = model.name
    return model_by_name


def read_content(json_bytes: bytes) -> dict[str, Any]:
    """Decode the content of a ModelFile: {"transformers": the configuration} or {"torchvision": the name}.

    The file may come from another machine, together with a run, so it is checked again. Raises InputError; its message does not
    contain the name of the file.
    """
    try:
        model_description = json.loads(json_bytes, object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise InputError("is not JSON.") from None
    if not isinstance(model_description, dict) or [type(value) for value in model_description.values()] not in ([dict], [str]):
        raise InputError("is not the file of a model.")
    _check_keys("has", model_description, 0)
    return model_description


def read_model(model_entry: ModelByConfiguration, folder: Path) -> ModelFile:
    """Read the model that a matrix file gives by its configuration. folder: the folder of the matrix file.

    Raises InputError; its message does not contain the place in the matrix file.
    """
    if (model_entry.transformers is None) == (model_entry.torchvision is None):
        given_keys = "neither" if model_entry.transformers is None else "both"
        raise InputError(f"exactly one of transformers and torchvision is needed, found {given_keys}.")
    if model_entry.torchvision is not None:
        if model_entry.seq_len is not None:
            raise InputError("seq_len: an image classifier has no sequences. Allowed: leave seq_len out.")
        model_bytes = _encode_canonical({"torchvision": model_entry.torchvision})
        return ModelFile(model_entry.torchvision, None, f"torchvision: {model_entry.torchvision}", model_bytes, None)
    assert model_entry.transformers is not None
    path = PurePosixPath(model_entry.transformers)
    if path.is_absolute() or ".." in path.parts or "\\" in model_entry.transformers or path.suffix != CONFIGURATION_SUFFIX:
        raise InputError(
            f"found the file {model_entry.transformers!r}. Allowed: the path of a .json file in the folder of the matrix, or "
            "below it, such as models/llama.json."
        )
    configuration_path = folder / path
    configuration = _read_configuration(configuration_path)
    model_bytes = _encode_canonical({"transformers": configuration})
    return ModelFile(_make_model_name(path), str(path), str(configuration_path), model_bytes, model_entry.seq_len)


def _make_model_name(path: PurePosixPath) -> str:
    """The name of a model: the name of its file, or of the file's folder if the file is named config.json."""
    base_name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    model_name = re.sub(r"[^a-z0-9._-]+", "-", base_name.lower()).strip("-._")[:LONGEST_NAME]
    if not model_name:
        raise InputError(f"{str(path)!r} gives the workload no name. Allowed: a file name with letters or digits.")
    return model_name


def _read_configuration(file: Path) -> dict[str, Any]:
    """Read and check a configuration. Raises an InputError that names the file."""
    json_bytes = plugin_source.read_plugin_file(file, "a configuration, which has a few KiB")
    try:
        configuration = json.loads(json_bytes, object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{file}: is not JSON: {reason}.") from None
    if not isinstance(configuration, dict):
        raise InputError(f"{file}: is no configuration of a model. Allowed: a JSON object, as config.json of transformers.")
    _check_keys(f"{file}: has", configuration, 0)
    return configuration


def _check_keys(message_start: str, json_value: Any, depth: int) -> None:
    """Raise InputError if a configuration has a key that is not allowed, at any depth. message_start: the first words of the
    message."""
    if depth > MOST_DEPTH:
        raise InputError(f"{message_start} values deeper than {MOST_DEPTH} levels.")
    if isinstance(json_value, dict):
        for key, child_value in json_value.items():
            if key in REFUSED_KEYS and child_value is not None and child_value is not False:
                raise InputError(
                    f"{message_start} the key {key!r}: {REFUSED_KEYS[key]}. Allowed: a configuration without this key."
                )
            _check_keys(message_start, child_value, depth + 1)
    elif isinstance(json_value, list):
        for child_value in json_value:
            _check_keys(message_start, child_value, depth + 1)


def _refuse_repeated_keys(key_value_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value_by_key = dict(key_value_pairs)
    if len(value_by_key) < len(key_value_pairs):
        repeated_key = next(key for index, (key, _) in enumerate(key_value_pairs) if key in dict(key_value_pairs[:index]))
        raise ValueError(f"the key {repeated_key[:40]!r} is there twice")
    return value_by_key


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _encode_canonical(model_content: dict[str, Any]) -> bytes:
    return json.dumps(model_content, sort_keys=True, separators=(",", ":")).encode()
