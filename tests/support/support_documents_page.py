"""Generates the pages docs/reference/json-files.md and json-output.md from support_documents.py and the types in the code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import support_field_texts
from support_document import Described, Key, Struct
from support_documents import ALSO, COMMANDS, FILES, USED
from support_reference import WRITTEN, Schema

from shardlab.files import field_docs
from shardlab.runs.record import Event

EVENTS = {
    "rendered": "the folder of the run was written",
    "submitted": "the run was sent; data: the scheduler and its number of the job",
    "refused": "the scheduler did not accept it; data: why",
    "queued": "the run waits for a reason that `why` names",
    "started": "the supervisor started the ranks",
    "met": "all ranks found each other; data: the backend",
    "resumed": "the run resumed from a checkpoint; data: its step",
    "requeued": "the supervisor asked Slurm to start the run again; data: after (the state of the run), why",
    "held": "the run waits until `jobs retry --only held`; data: why",
    "released": "a held run was released",
    "cancel_requested": "`jobs cancel` asked for the end of the run",
    "cancelled": "the run was cancelled before it started",
    "exited": "the ranks ended; data: exit code, reason, why",
    "failed": "a rank or a node could not do its part; data: why",
    "imported": "the run was made from logs of another program; data: why, with the names of the files",
    "clock": "the clocks of two hosts were compared; data: offset_s, within_s",
    "sampler_ended": "the sampler of a host ended while the run continued; data: its exit code",
}
FILE_RULES = """
Paths are relative to the workspace. Files that end with `.jsonl` have one object per line. All text is UTF-8.

- `schema` is the version of the format. A reader should ignore keys that it does not know.
- A value that was not measured is `null` or absent, never 0. Each type says whether it leaves keys out.
- Names end with their unit: `_s` seconds, `_ms` milliseconds, `_ns` nanoseconds, `_bytes`, `_gib`, `_w` watts, `_pct` percent,
  `_mhz`. `_s` of a moment is seconds since the epoch, except for `t_s`.
- [Output of --json](json-output.md) describes what commands print.
"""
OUTPUT_RULES = """
With `--json` a command prints one document on standard output, and everything else on standard error. The exit codes are
those of [Commands](commands.md). A value that is not known is `null` or absent, never 0; [files](json-files.md) has the rules
for names and units, and the types that both have.
"""


def files() -> str:
    """The content of the page json-files.md."""
    events = ["### Kinds of events\n", "Most of them; a reader should ignore kinds that it does not know.\n"]
    events += ["| event | meaning |", "|---|---|"]
    events += [f"| `{name}` | {meaning} |" for name, meaning in EVENTS.items()]
    kinds = _types([one.kind for one in FILES if one.kind])
    return _page("JSON files", FILE_RULES, FILES, events, kinds, {})


def output() -> str:
    """The content of the page json-output.md. For a type that json-files.md describes, it has a link to that page."""
    there = _types([one.kind for one in FILES if one.kind])
    own = _types([*USED, *(one.kind for one in COMMANDS if one.kind)])
    return _page("Output of --json", OUTPUT_RULES, COMMANDS, [], {n: k for n, k in own.items() if n not in there}, there)


def _types(roots: Sequence[Struct]) -> dict[str, Struct]:
    """The types `roots` and all types that their fields contain, by name."""
    found: dict[str, Struct] = {}
    for root in roots:
        found |= field_docs.nested_structs(root)
    return dict(sorted(found.items()))


def _page(
    title: str, rules: str, documents: Sequence[Described], more: list[str], own: dict[str, Struct], there: dict[str, Struct]
) -> str:
    roots = {one.kind.__name__ for one in documents if one.kind}
    heading = {one.kind.__name__: _anchor(one.name) for one in (*COMMANDS, *FILES) if one.kind}
    links = {name: f"[{name}](json-files.md#{heading.get(name, name.lower())})" for name in there}
    links |= {name: f"[{name}](#{heading[name] if name in roots else name.lower()})" for name in own}
    parts = [f"# {title}\n", WRITTEN + rules]
    for one in documents:
        parts += [f"## {one.name}\n", f"{_linked(one.about, links)}\n"]
        if one.kind is not None and one.kind.__name__ in there:
            names = f" Only these keys: {', '.join(f'`{name}`' for name in one.only)}." if one.only else ""
            parts.append(f"Keys: as {links[one.kind.__name__]}.{names}\n")
        elif one.kind is not None:
            parts += [*_about(one.kind), *_fields(one.kind, links, one.keys)]
            if one.keys:
                parts.append("\nAnd these keys:\n")
        if one.keys:
            parts += ["| key | value | what it is |", "|---|---|---|"]
            parts += [_row(name, key, links) for name, key in one.keys.items()]
        parts.append("")
        if one.kind is Event:
            parts += [*more, ""]
    parts.append("## Types in these documents\n")
    for name, kind in own.items():
        if name in roots:
            continue
        parts += [f"### {name}\n", f"{support_field_texts.summary(kind)}\n", *_about(kind), *_fields(kind, links), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def _anchor(heading: str) -> str:
    """The anchor that a heading has in the HTML pages of the documentation."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _row(name: str, key: Key, links: dict[str, str]) -> str:
    named = f"`{name}`" if key.always else f"`{name}` (not always)"
    return f"| {named} | {_linked(_cell(key.value), links)} | {_linked(_cell(key.what), links)} |"


def _about(kind: Struct) -> list[str]:
    return ["A key whose value is its default is absent.\n"] if kind.__struct_config__.omit_defaults else []


def _fields(kind: Struct, links: dict[str, str], replaced: Mapping[str, Key] = {}) -> Iterator[str]:
    _, components = msgspec.json.schema_components([kind], ref_template="{name}")
    texts, described = support_field_texts.of(kind), components[kind.__name__]
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    properties = described.get("properties") or dict(zip(names, described["prefixItems"], strict=True))
    if kind.__struct_config__.array_like:
        yield "A list of these values, in this order.\n"
    yield "| key | value | what it is |"
    yield "|---|---|---|"
    for field in msgspec.structs.fields(kind):
        if field.name in replaced:
            continue
        schema = properties[field.encode_name]
        yield f"| `{field.encode_name}` | {_linked(_cell(_value(schema)), links)} | {_cell(texts[field.name])} |"
    for name, key in ALSO.get(kind, {}).items():
        yield _row(name, key, links)


def _value(schema: Schema) -> str:
    """The values that a key may have, in words. schema: the JSON Schema of the key."""
    if "$ref" in schema:
        return str(schema["$ref"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_value(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join("null" if value is None else f"`{value}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_value(schema['items'])}" if isinstance(schema.get("items"), dict) else "list"
    if kind == "object":
        inside = schema.get("additionalProperties")
        return f"mapping to {_value(inside)}" if isinstance(inside, dict) and inside else "mapping"
    if schema.get("format") == "date-time":
        return "time (ISO 8601)"
    return {"string": "text"}.get(str(kind), str(kind) if kind else "any")


def _linked(text: str, links: Mapping[str, str]) -> str:
    """The text with a link at each name of a type that has a section."""
    parts = re.split(r"(\[[^\]]*\]\([^)]*\)|`[^`]*`)", text)
    return "".join(
        part if index % 2 else re.sub(r"\b[A-Z][A-Za-z]+\b", lambda name: links.get(name[0], name[0]), part)
        for index, part in enumerate(parts)
    )


def _cell(text: str) -> str:
    shown = text if ". " in text or text.endswith("...") else text.removesuffix(".")
    return shown.replace("|", "\\|").replace("<", "&lt;")
