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

SCHEMA_FOLDER = Path(__file__).parent / "schemas"
SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Cell keys with members that a matrix file can also name directly, as in `optimizer.lr`.
KEYS_WITH_MEMBERS = ("optimizer", "schedule", "instruments")
OPTION_PATTERN = r"^options\..+$"  # matches options of a strategy or workload, whose names the schema does not list

LIST_SCHEMA = {"type": "array", "minItems": 1}

Schema = dict[str, Any]


def make_schemas() -> dict[str, Schema]:
    """The JSON Schema of each kind of file that users write, by name: cluster, matrix."""
    return {"cluster": _make_file_schema("cluster.yaml", Cluster, {}), "matrix": _make_matrix_schema()}


def encode_schema(schema: Schema) -> bytes:
    """A schema as indented JSON, for its file."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"


def write_schemas() -> None:
    """Write every schema into the folder shardlab/schemas, for editors and for `shardlab schema`."""
    SCHEMA_FOLDER.mkdir(exist_ok=True)
    for schema_name, schema in make_schemas().items():
        (SCHEMA_FOLDER / f"{schema_name}.schema.json").write_bytes(encode_schema(schema))


def _make_matrix_schema() -> Schema:
    key_schemas, definitions = _make_cell_key_schemas()
    # The schema of a key contains its default: the value that a cell without this key has. In the schemas of axes, inclusions
    # and exclusions a default would be wrong, so it is removed there.
    schemas_without_default = {
        key: {keyword: value for keyword, value in schema.items() if keyword != "default"}
        for key, schema in key_schemas.items()
    }
    axes_schema = _make_cell_mapping_schema(
        {key: _make_value_list_schema(schema) for key, schema in schemas_without_default.items()}, LIST_SCHEMA
    )
    condition_help = "A condition on the keys of a cell, such as `gpus > 4 and tp == 1`."
    conditions_schema = {
        "when": {"type": "string", "description": condition_help},
        "why": {"type": "string", "description": "The reason, which `jobs plan` and the report show."},
    }
    cell_schema = _make_cell_mapping_schema(key_schemas)
    definitions |= {
        "CellKeys": {"title": "CellKeys", "description": "Keys of a cell; none is required.", **cell_schema},
        "Axes": {"title": "Axes", "description": "Keys of a cell, each with the list of its values.", **axes_schema},
        "Inclusion": {"title": "Inclusion", **_make_cell_mapping_schema(schemas_without_default | conditions_schema)},
        "Exclusion": {
            "title": "Exclusion",
            **_make_cell_mapping_schema(schemas_without_default | conditions_schema),
            "required": ["why"],
        },
    }
    schema = _make_file_schema("matrix.yaml", MatrixFile, definitions)
    for key, key_schema in {
        "defaults": _make_reference("CellKeys"),
        "axes": _make_reference("Axes"),
        "zip": {"type": "array", "items": _make_reference("Axes")},
        "exclude": {"type": "array", "items": _make_reference("Exclusion")},
        "include": {"type": "array", "items": _make_reference("Inclusion")},
    }.items():
        schema["properties"][key] = {"description": schema["properties"][key]["description"], **key_schema}
    return schema


def _make_value_list_schema(key_schema: Schema) -> Schema:
    """The schema of a list of values of a cell key. The description of the key becomes the description of the list.

    key_schema: the schema of one value.
    """
    value_schema = dict(key_schema)
    return {"description": value_schema.pop("description"), **LIST_SCHEMA, "items": value_schema}


def _make_cell_key_schemas() -> tuple[Schema, Schema]:
    """Returns (cell key -> its schema, also for dotted keys; name of each type that these schemas name -> its schema)."""
    draft_keys = [field.name for field in msgspec.structs.fields(Draft)]
    type_schemas = _make_component_schemas(Draft, ModelByConfiguration)
    key_schemas: Schema = dict(type_schemas.pop("Draft")["properties"])
    assert set(key_schemas) == set(draft_keys)
    workload_schema = key_schemas["workload"]
    workload_forms = [{"type": workload_schema["type"]}, _make_reference(ModelByConfiguration.__name__)]
    key_schemas["workload"] = {"description": workload_schema["description"], "anyOf": workload_forms}
    for mapping_key in KEYS_WITH_MEMBERS:
        member_schemas = type_schemas[mapping_key.capitalize()]["properties"]
        key_schemas |= {f"{mapping_key}.{member}": member_schema for member, member_schema in member_schemas.items()}
    assert all(key_type(key) is not None for key in key_schemas)  # the schema offers only keys that the reader accepts
    return key_schemas, type_schemas


def _make_cell_mapping_schema(key_schemas: Schema, option_schema: Schema | None = None) -> Schema:
    """The schema of a mapping that may contain the given cell keys, and options such as `options.bucket_mb`.

    key_schemas: cell key -> its schema. option_schema: the schema of the value of an option; None: text, a number, true, false
    or null."""
    return {
        "type": "object",
        "properties": key_schemas,
        "patternProperties": {OPTION_PATTERN: option_schema or {"type": ["boolean", "integer", "number", "string", "null"]}},
        "additionalProperties": False,
    }


def _make_file_schema(title: str, content_type: type[msgspec.Struct], further_types: Schema) -> Schema:
    """The schema of a file. title: the name of the file. content_type: the type of its content.

    further_types: further schemas to which the schema of the file refers, by name.
    """
    type_schemas = _make_component_schemas(content_type)
    root_schema = type_schemas.pop(content_type.__name__)
    return {
        "$schema": SCHEMA_DIALECT,
        **root_schema,
        "title": title,
        "$defs": dict(sorted((type_schemas | further_types).items())),
    }


def _make_component_schemas(*root_types: type[msgspec.Struct]) -> Schema:
    """Name of a type -> its schema, for these types and the types of their fields. Made by msgspec.

    The description of a key is the docstring of its field, which msgspec does not know.
    """
    _, made_components = msgspec.json.schema_components(root_types, ref_template="#/$defs/{name}")
    # Editors read patterns as JavaScript does, which has no \Z and whose $ does not match before a line break.
    type_schemas: Schema = msgspec.json.decode(msgspec.json.encode(made_components).replace(rb"\\Z", b"$"))
    for described_schema in (schema for schema in type_schemas.values() if "description" in schema):
        described_schema["description"] = field_docs.join_lines(described_schema["description"])
    for root_type in root_types:
        for type_name, struct_type in field_docs.map_nested_structs(root_type).items():
            for field_name, description in field_docs.read_field_docs(struct_type).items():
                type_schemas[type_name]["properties"][field_name]["description"] = description
    return type_schemas


def _make_reference(type_name: str) -> Schema:
    return {"$ref": f"#/$defs/{type_name}"}


if __name__ == "__main__":
    write_schemas()
