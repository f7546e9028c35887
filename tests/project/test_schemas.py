"""The schemas that editors use for our files agree with the code that reads these files."""

import functools
import json
import re
from pathlib import Path

import msgspec
import pytest
from jsonschema import Draft202012Validator

from shardlab import json_schema
from shardlab.cli import SCHEMA_NAMES, main
from shardlab.cluster import cluster
from shardlab.errors import InputError
from shardlab.files import document
from shardlab.matrix import matrix
from shardlab.matrix.cell import Draft

ROOT = Path(__file__).parents[2]
schemas = functools.cache(json_schema.make_schemas)
READERS = {"cluster": cluster.load_cluster, "matrix": matrix.load_matrix}
FILES = [("cluster", ROOT / "examples/local.yaml"), *(("matrix", path) for path in sorted((ROOT / "matrices").glob("*.yaml")))]


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_the_files_are_current(name, capsys):
    made = json_schema.encode_schema(schemas()[name])
    assert (json_schema.SCHEMA_FOLDER / f"{name}.schema.json").read_bytes() == made, "make golden, then read the diff"
    assert main(["schema", name]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(made)


def test_every_reference_is_defined():
    for schema in schemas().values():
        text = json.dumps(schema)
        for name in {part.split('"')[0] for part in text.split("#/$defs/")[1:]}:
            assert name in schema["$defs"]


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_each_key_says_what_it_means(name):
    schema = schemas()[name]
    for place, part in {"": schema, **schema["$defs"]}.items():
        for key, value in part.get("properties", {}).items():
            assert value.get("description", "").endswith("."), f"{name}: {place}.{key}"


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_descriptions_are_paragraphs_of_one_line_each(name):
    """From Python 3.13 on, the compiler removes the indentation of docstrings. A description that kept line breaks would differ
    between versions of Python."""
    for text in descriptions(schemas()[name]):
        assert all(paragraph == " ".join(paragraph.split()) for paragraph in text.split("\n\n")), text


def descriptions(schema: object) -> list[str]:
    """All descriptions in a schema, at any depth."""
    if isinstance(schema, list):
        return [text for part in schema for text in descriptions(part)]
    if not isinstance(schema, dict):
        return []
    texts = [schema["description"]] if isinstance(schema.get("description"), str) else []
    return texts + [text for part in schema.values() for text in descriptions(part)]


def test_every_key_of_a_cell_is_optional_and_in_the_schema():
    schema = schemas()["matrix"]
    keys = schema["$defs"]["CellKeys"]
    assert "required" not in keys
    assert {field.name for field in msgspec.structs.fields(Draft)} <= set(keys["properties"])
    assert {"optimizer.lr", "schedule.name"} <= set(keys["properties"])
    assert all(matrix.key_type(key) is not None for key in keys["properties"])
    assert schema["$defs"]["Axes"]["properties"]["gpus"]["items"] == {"type": "integer", "minimum": 1, "maximum": 1 << 20}
    assert schema["$defs"]["Exclusion"]["required"] == ["why"]
    assert schema["properties"]["axes"]["$ref"] == "#/$defs/Axes"


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_each_schema_is_a_valid_json_schema(name):
    """Each schema is a valid JSON Schema of the draft 2020-12."""
    schema = schemas()[name]
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(("name", "path"), FILES, ids=lambda value: getattr(value, "stem", value))
def test_shipped_files_satisfy_their_schema(name, path):
    data = document.load_document(path).data
    assert mistakes(name, data) == []
    assert mistakes(name, data | {"surprise": 1}) == [("", "additionalProperties")]


@pytest.mark.parametrize(
    ("name", "text", "where", "word"),
    [
        ("cluster", "{schema: 1, name: Bad Name, provider: local}", "name", "pattern"),
        ("cluster", "{schema: 2, name: a, provider: local}", "schema", "enum"),
        ("cluster", "{schema: 1, name: a}", "", "required"),
        ("matrix", "{schema: 1, name: a, axes: {gpus: [0]}}", "axes.gpus.0", "minimum"),
        ("matrix", "{schema: 1, name: a, axes: {gpus: []}}", "axes.gpus", "minItems"),
        ("matrix", "{schema: 1, name: a, axes: {gpus: ['2']}}", "axes.gpus.0", "type"),
        ("matrix", "{schema: 1, name: a, axes: {optimizer.momentum: [1.0]}}", "axes.optimizer.momentum.0", "exclusiveMaximum"),
        ("matrix", "{schema: 1, name: a, repeats: 1001}", "repeats", "anyOf"),
        ("matrix", "{schema: 1, name: a, defaults: {optimizer.lr: 0}}", "defaults.optimizer.lr", "exclusiveMinimum"),
        ("matrix", "{schema: 1, name: a, defaults: {optimizer.lrr: 1}}", "defaults", "additionalProperties"),
        ("matrix", "{schema: 1, name: a, exclude: [{gpus: 2}]}", "exclude.0", "required"),
    ],
)
def test_the_reader_refuses_each_mistake_that_the_schema_marks(name, text, where, word, tmp_path):
    assert mistakes(name, document.parse_document(text.encode(), "x").data) == [(where, word)]
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(InputError):
        READERS[name](tmp_path / "file.yaml")


def test_the_schema_allows_every_name_of_an_option():
    assert mistakes("matrix", {"schema": 1, "name": "a", "defaults": {"options.anything": True}}) == []


def test_the_bounds_of_each_key_are_those_of_the_reader(tmp_path):
    """The schema and the reader both refuse a value beyond a bound. The schema accepts the bound itself or, for an exclusive
    bound, a value inside it."""
    tried = 0
    beside = {"minimum": (-1, 0), "maximum": (1, 0), "exclusiveMinimum": (0, 0.5), "exclusiveMaximum": (0, -0.5)}
    for key, schema in schemas()["matrix"]["$defs"]["CellKeys"]["properties"].items():
        options = [schema, *schema.get("anyOf", [])]
        for bound, wrong, right in ((one[word], *beside[word]) for one in options for word in beside if word in one):
            tried += 1
            wrong *= bound if isinstance(bound, float) and bound > 1e15 else 1  # not rounded away
            assert mistakes("matrix", {"schema": 1, "name": "a", "defaults": {key: bound + wrong}}), (key, bound)
            assert mistakes("matrix", {"schema": 1, "name": "a", "defaults": {key: bound + right}}) == [], (key, bound)
            (tmp_path / "file.yaml").write_text(f"{{schema: 1, name: a, defaults: {{{key}: {bound + wrong}}}}}")
            with pytest.raises(InputError, match=re.escape(key)):
                matrix.load_matrix(tmp_path / "file.yaml")
    assert tried > 20


def mistakes(name, data):
    """Returns the mistakes that an independent library finds: for each, the place in the data and the keyword of the schema
    that refuses it."""
    found = Draft202012Validator(schemas()[name]).iter_errors(data)
    return [(".".join(map(str, error.absolute_path)), str(error.validator)) for error in found]
