"""Makes the JSON Schemas of cluster.yaml and matrix.yaml. With a schema, an editor completes keys and marks mistakes.

The schemas are made from the types that read these files. ``python -m shardlab.json_schema`` writes the schemas to their files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shardlab.cluster.cluster import Cluster
from shardlab.files import field_docs
from shardlab.matrix.cell import Draft
from shardlab.matrix.matrix import MatrixFile, key_type
from shardlab.matrix.model_file import ModelByConfiguration

FOLDER = Path(__file__).parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Cell keys with members that a matrix file can also name directly, as in `optimizer.lr`.
REFINED = ("optimizer", "schedule", "instruments")
OPTIONS = r"^options\..+$"  # matches options of a strategy or workload, whose names the schema does not list

LIST = {"type": "array", "minItems": 1}

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """The JSON Schema of each kind of file that users write, by name: cluster, matrix."""
    return {"cluster": _cluster(), "matrix": _matrix()}


def text(schema: Schema) -> bytes:
    """A schema as indented JSON, for its file."""
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
    # The schema of a key contains its default: the value that a cell without this key has. In the schemas of axes, inclusions
    # and exclusions a default would be wrong, so it is removed there.
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
    """The schema of a list of values of a cell key. The description of the key becomes the description of the list.

    schema: the schema of one value.
    """
    value = dict(schema)
    return {"description": value.pop("description"), **LIST, "items": value}


def _cell_keys() -> tuple[Schema, Schema]:
    """Returns (cell key -> its schema, also for dotted keys; name of each type that these schemas name -> its schema)."""
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
    """The schema of a mapping that may contain the given cell keys, and options such as `options.bucket_mb`.

    keys: cell key -> its schema. option: the schema of the value of an option; None: text, a number, true, false or null.
    """
    return {
        "type": "object",
        "properties": keys,
        "patternProperties": {OPTIONS: option or {"type": ["boolean", "integer", "number", "string", "null"]}},
        "additionalProperties": False,
    }


def _document(title: str, shape: type[msgspec.Struct], definitions: Schema) -> Schema:
    """The schema of a file. title: the name of the file. shape: the type of its content.

    definitions: further schemas to which the schema of the file refers, by name.
    """
    components = _components(shape)
    root = components.pop(shape.__name__)
    return {"$schema": DIALECT, **root, "title": title, "$defs": dict(sorted((components | definitions).items()))}


def _components(*shapes: type[msgspec.Struct]) -> Schema:
    """Name of a type -> its schema, for these types and the types of their fields. Made by msgspec.

    The description of a key is the docstring of its field, which msgspec does not know.
    """
    _, made = msgspec.json.schema_components(shapes, ref_template="#/$defs/{name}")
    # Editors read patterns as JavaScript does, which has no \Z and whose $ does not match before a line break.
    components: Schema = msgspec.json.decode(msgspec.json.encode(made).replace(rb"\\Z", b"$"))
    for component in (one for one in components.values() if "description" in one):
        component["description"] = field_docs.join_lines(component["description"])
    for shape in shapes:
        for name, kind in field_docs.structs(shape).items():
            for key, description in field_docs.of(kind).items():
                components[name]["properties"][key]["description"] = description
    return components


def _reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


if __name__ == "__main__":
    write()
