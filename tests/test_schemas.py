"""What an editor is told about our files is what the reader of those files takes."""

import json
from pathlib import Path

import msgspec
import pytest

from shardlab import document, json_schema, matrix
from shardlab.cell import Draft
from shardlab.cli import SCHEMAS, main

ROOT = Path(__file__).parent.parent
FILES = [("cluster", ROOT / "examples/local.yaml"), *(("matrix", path) for path in sorted((ROOT / "matrices").glob("*.yaml")))]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_files_are_current(name, capsys):
    made = json_schema.text(json_schema.schemas()[name])
    assert (json_schema.FOLDER / f"{name}.schema.json").read_bytes() == made, "run: python -m shardlab.json_schema"
    assert main(["schema", name]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(made)


def test_every_reference_is_defined():
    for schema in json_schema.schemas().values():
        text = json.dumps(schema)
        for name in {part.split('"')[0] for part in text.split("#/$defs/")[1:]}:
            assert name in schema["$defs"]


def test_no_key_of_a_cell_is_required_and_every_one_is_offered():
    schema = json_schema.schemas()["matrix"]
    keys = schema["$defs"]["CellKeys"]
    assert "required" not in keys
    assert {field.name for field in msgspec.structs.fields(Draft)} <= set(keys["properties"])
    assert {"optimizer.lr", "schedule.name"} <= set(keys["properties"])
    assert all(matrix.key_type(key) is not None for key in keys["properties"])
    assert schema["$defs"]["Axes"]["properties"]["gpus"]["items"] == {"type": "integer", "minimum": 1}
    assert schema["$defs"]["Exclusion"]["required"] == ["why"]
    assert schema["properties"]["axes"] == {"$ref": "#/$defs/Axes"}


@pytest.mark.parametrize(("name", "path"), FILES, ids=lambda value: getattr(value, "stem", value))
def test_shipped_files_satisfy_their_schema(name, path):
    schema = json_schema.schemas()[name]
    data = document.load(path).data
    assert list(mistakes(data, schema, schema["$defs"])) == []
    assert list(mistakes(data | {"surprise": 1}, schema, schema["$defs"])) == ["surprise: not offered"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("cluster", "{schema: 1, name: Bad Name, provider: local}", "pattern"),
        ("cluster", "{schema: 2, name: a, provider: local}", "enum"),
        ("cluster", "{schema: 1, name: a}", "provider: missing"),
        ("matrix", "{schema: 1, name: a, axes: {gpus: [0]}}", "minimum"),
        ("matrix", "{schema: 1, name: a, axes: {gpus: []}}", "minItems"),
        ("matrix", "{schema: 1, name: a, defaults: {optimizer.lrr: 1}}", "optimizer.lrr: not offered"),
        ("matrix", "{schema: 1, name: a, exclude: [{gpus: 2}]}", "why: missing"),
        ("matrix", "{schema: 1, name: a, defaults: {options.anything: true}}", None),
    ],
)
def test_mistakes_are_marked(name, text, says):
    schema = json_schema.schemas()[name]
    found = list(mistakes(document.parse(text.encode(), "x").data, schema, schema["$defs"]))
    assert (says in " ".join(found)) if says else found == []


def mistakes(data, schema, definitions):
    """The few words of JSON Schema that ours use, so that the tests need no package for it."""
    import re

    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        found = [list(mistakes(data, option, definitions)) for option in schema["anyOf"]]
        if not any(not each for each in found):
            yield "anyOf"
        return
    assert set(schema) <= {
        "$schema", "$defs", "title", "description", "default", "type", "properties", "required", "additionalProperties",
        "patternProperties", "items", "minItems", "enum", "pattern", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum",
    }  # fmt: skip
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    wanted = schema.get("type", [])
    allowed = [wanted] if isinstance(wanted, str) else wanted
    if allowed and not any(data is None if kind == "null" else isinstance(data, kinds[kind]) for kind in allowed):
        yield f"type {wanted}"
        return
    if "enum" in schema and data not in schema["enum"]:
        yield "enum"
    if "pattern" in schema and not re.search(schema["pattern"], data):
        yield "pattern"
    if "minimum" in schema and data < schema["minimum"]:
        yield "minimum"
    if "exclusiveMinimum" in schema and data <= schema["exclusiveMinimum"]:
        yield "exclusiveMinimum"
    if isinstance(data, list):
        if len(data) < schema.get("minItems", 0):
            yield "minItems"
        for item in data:
            yield from mistakes(item, schema.get("items", {}), definitions)
    if isinstance(data, dict):
        yield from (f"{key}: missing" for key in schema.get("required", []) if key not in data)
        for key, value in data.items():
            patterns = [s for pattern, s in schema.get("patternProperties", {}).items() if re.search(pattern, key)]
            offered = schema.get("properties", {}).get(
                key, patterns[0] if patterns else schema.get("additionalProperties", True)
            )
            if offered is False:
                yield f"{key}: not offered"
            elif isinstance(offered, dict):
                yield from mistakes(value, offered, definitions)
