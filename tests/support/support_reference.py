"""Generates the pages of docs/reference from the code: the keys of both files, the commands, and the states of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import collect.cli
import jobs.cli
import provision.cli
import shardlab.cli
from shardlab import json_schema
from shardlab.record_types import LARGEST_INTEGER
from shardlab.runs.state import STATE_MEANINGS

Schema = dict[str, Any]
WRITTEN = "This page is written from the code by `make golden`.\n"
# Types of the JSON Schema that get no section of their own on the page, because the keys `exclude`, `include` and `axes`
# describe what these types allow.
OMITTED = ("Inclusion", "Exclusion", "Axes")
DOTTED = "Members of `optimizer` and `schedule` may also be given alone, such as `optimizer.lr`."
CLUSTER = (
    "An unknown key, a duplicate key, or a value of another type is refused with file, line and column. `provision init` "
    "prints a file with comments; [Provisioning](../provision.md) explains the providers. Editors complete the keys with "
    "`shardlab schema cluster`."
)
MATRIX = (
    "`axes`, `exclude` and `include` mean the same as in a matrix of GitHub Actions. `jobs plan --matrix ./FILE.yaml` shows "
    "the cells. Editors complete the keys with `shardlab schema matrix`."
)
MAINS: dict[str, Callable[[list[str]], int]] = {
    "shardlab": shardlab.cli.main,
    "provision": provision.cli.main,
    "jobs": jobs.cli.main,
    "collect": collect.cli.main,
}
COMMANDS = (
    *MAINS,
    "shardlab shell-init",
    "shardlab schema",
    *(f"{cli.__package__} {verb.name}" for cli in (provision.cli, jobs.cli, collect.cli) for verb in cli.VERBS),
)
PAGES = {"cluster": ("Keys of cluster.yaml", CLUSTER), "matrix": ("Keys of matrix.yaml", MATRIX)}


def keys(name: str) -> str:
    """The page about the keys of cluster.yaml or matrix.yaml: a table for the file and a table for each mapping in the file."""
    schema = json_schema.make_schemas()[name]
    title, about = PAGES[name]
    parts = [f"# {title}\n", WRITTEN, f"{about}\n", *_table(schema)]
    for kind, part in schema["$defs"].items():
        if kind in OMITTED:
            continue
        parts += [f"\n## {kind}\n", f"{_first_paragraph(part)}\n"]
        if kind == "CellKeys":
            parts.append(f"{DOTTED}\n")
        parts += _table(part)
    return "\n".join(parts) + "\n"


def _first_paragraph(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split("\n\n")[0].split())


def _table(schema: Schema) -> Iterator[str]:
    required = schema.get("required", [])
    yield "| key | value | default | what it is |"
    yield "|---|---|---|---|"
    for key, part in schema["properties"].items():
        if "." in key:
            continue
        default = "required" if key in required else _default(part)
        yield f"| `{key}` | {_value(part)} | {default} | {_cell(part['description'])} |"


def _default(part: Schema) -> str:
    return f"`{_cell(json.dumps(part['default']))}`" if "default" in part else ""


def _value(part: Schema) -> str:
    """The values that a key may have, in words. part: the JSON Schema of the key."""
    if "$ref" in part:
        kind = part["$ref"].rpartition("/")[2]
        return "as an axis" if kind == "Axes" else f"[{kind}](#{kind.lower()})" if kind not in OMITTED else "keys of a cell"
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_value(one) for one in part["anyOf"]))
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if part.get("type") == "array":
        return f"list of {_value(part['items'])}" if "items" in part else "list"
    if part.get("type") == "object":
        return "mapping"
    return {"integer": "integer", "number": "number", "string": "text", "boolean": "`true`, `false`", "null": "`null`"}.get(
        part.get("type", ""), "any"
    ) + _bounds(part)


def _bounds(part: Schema) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    numbers_of_the_machine = (LARGEST_INTEGER, 1e150)  # bounds that nobody reaches
    named = [
        f"{word} {part[key]:,}" for key, word in words.items() if part.get(key, LARGEST_INTEGER) not in numbers_of_the_machine
    ]
    return f" ({', '.join(named)})" if named else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def commands(helps: Mapping[str, str]) -> str:
    """The page with the help texts of all commands. helps: the help text of each command."""
    parts = [
        "# Commands\n",
        WRITTEN,
        "`--json` prints one document. Exit codes: 0 everything succeeded, 1 something did not succeed, ",
    ]
    parts[-1] += "2 the input is wrong and nothing was changed, 130 after Ctrl-C (runs continue).\n"
    for name, text in sorted(helps.items()):
        parts += [f"## {name}\n", "```text", text.rstrip("\n"), "```\n"]
    return "\n".join(parts)


def states() -> str:
    """The page about the states of a run."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in STATE_MEANINGS.items()]
    head = ["# States of a run\n", WRITTEN, "| state | meaning |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n"
