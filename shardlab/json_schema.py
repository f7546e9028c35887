"""Makes the JSON Schemas of cluster.yaml and matrix.yaml. With a schema, an editor completes keys and marks mistakes.

The schemas are made from the types that read these files. ``python -m shardlab.json_schema`` writes the schemas to their files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shardlab import field_docs
from shardlab.cell import Draft
from shardlab.cluster import Cluster
from shardlab.matrix import MatrixFile, key_type
from shardlab.model_file import ModelByConfiguration

FOLDER = Path(__file__).parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFINED = ("optimizer", "schedule")  # keys whose members can be keys of an axis themselves, such as `optimizer.lr`
OPTIONS = r"^options\..+$"  # options of a strategy or workload; only the strategy or workload knows their names

LIST = {"type": "array", "minItems": 1}

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """The JSON Schema of each kind of file that users write, by name: cluster, matrix."""
    return {"cluster": _cluster(), "matrix": _matrix()}


def text(schema: Schema) -> bytes:
    """The content of the file of a schema."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"


def write() -> None:
    """Write every schema into the folder shardlab/schemas, for editors and for `shardlab schema`."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / f"{name}.schema.json").write_bytes(text(schema))


def _cluster() -> Schema:
    return _document("cluster.yaml", Cluster, {})


def _matrix() -> Schema:
    keys, definitions = _cell_keys()
    # The default of a key is the value if a cell does not have the key. In a list of values or in a condition, a default would
    # be wrong, so it is removed.
    named = {key: {word: value for word, value in schema.items() if word != "default"} for key, schema in keys.items()}
    axes = _mapping({key: _values(schema) for key, schema in named.items()}, LIST)
    when = "A condition on the keys of a cell, such as `gpus > 4 and tp == 1`."
    conditions = {
        "when": {"type": "string", "description": when},
        "why": {"type": "string", "description": "The reason, which `jobs plan` and the report show."},
    }
    cell = _mapping(keys)
    definitions |= {
        "CellKeys": {"title": "CellKeys", "description": "Keys of a cell; none is required.", **cell},
        "Axes": {"title": "Axes", "description": "Keys of a cell, each with the list of its values.", **axes},
        "Inclusion": {"title": "Inclusion", **_mapping(named | conditions)},
        "Exclusion": {"title": "Exclusion", **_mapping(named | conditions), "required": ["why"]},
    }
    schema = _document("matrix.yaml", MatrixFile, definitions)
    for key, content in {
        "defaults": _reference("CellKeys"),
        "axes": _reference("Axes"),
        "zip": {"type": "array", "items": _reference("Axes")},
        "exclude": {"type": "array", "items": _reference("Exclusion")},
        "include": {"type": "array", "items": _reference("Inclusion")},
    }.items():
        schema["properties"][key] = {"description": schema["properties"][key]["description"], **content}
    return schema


def _values(schema: Schema) -> Schema:
    """The schema of a list of values of a key. The description of the key becomes the description of the list."""
    value = dict(schema)
    return {"description": value.pop("description"), **LIST, "items": value}


def _cell_keys() -> tuple[Schema, Schema]:
    """(the schema of each cell key, dotted keys included; the definitions to which these schemas refer)."""
    names = [field.name for field in msgspec.structs.fields(Draft)]
    definitions = _components(Draft, ModelByConfiguration)
    keys: Schema = dict(definitions.pop("Draft")["properties"])
    assert set(keys) == set(names)
    named = keys["workload"]
    either = [{"type": named["type"]}, _reference(ModelByConfiguration.__name__)]
    keys["workload"] = {"description": named["description"], "anyOf": either}
    for name in REFINED:
        members = definitions[name.capitalize()]["properties"]
        keys |= {f"{name}.{member}": schema for member, schema in members.items()}
    assert all(key_type(key) is not None for key in keys)  # the schema offers only keys that the reader accepts
    return keys, definitions


def _mapping(keys: Schema, option: Schema | None = None) -> Schema:
    """The schema of a mapping with these keys, and with options by their dotted names.

    keys: the schema of each key. option: the schema of the value of an option; None: any plain value.
    """
    return {
        "type": "object",
        "properties": keys,
        "patternProperties": {OPTIONS: option or {"type": ["boolean", "integer", "number", "string", "null"]}},
        "additionalProperties": False,
    }


def _document(title: str, shape: type[msgspec.Struct], definitions: Schema) -> Schema:
    """The schema of a file whose content has the type `shape`. definitions: further definitions to which the schema refers."""
    components = _components(shape)
    root = components.pop(shape.__name__)
    return {"$schema": DIALECT, **root, "title": title, "$defs": dict(sorted((components | definitions).items()))}


def _components(*shapes: type[msgspec.Struct]) -> Schema:
    """The schemas that msgspec makes of these types and of all types in them, with docstrings of fields as descriptions."""
    _, components = msgspec.json.schema_components(shapes, ref_template="#/$defs/{name}")
    for shape in shapes:
        for name, kind in field_docs.structs(shape).items():
            for key, description in field_docs.of(kind).items():
                components[name]["properties"][key]["description"] = description
    return components


def _reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


if __name__ == "__main__":
    write()
