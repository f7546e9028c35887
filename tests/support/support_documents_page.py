"""Generates the pages json-files.md, json-output.md and json-types.md of docs/reference from support_documents.py and the types
in the code. Each type stands once, in json-types.md, and what many types say alike stands once, at its beginning."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import support_field_texts
from support_document import Described, Key, Struct
from support_documents import ALSO, COMMANDS, FILES, USED
from support_reference import WRITTEN, Schema

from shardlab import json_schema
from shardlab.files import field_docs
from shardlab.matrix.cell import AnyCell
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
# The types of a matrix file with their JSON Schemas: their page describes them, also where they are inside a document.
MATRIX: dict[str, Schema] = json_schema.make_schemas()["matrix"]["$defs"]
FILE_RULES = """
Paths are relative to the workspace. Files that end with `.jsonl` have one object per line. All text is UTF-8.
[Types](json-types.md) has the rules for names, units and unknown values, and all types; [Output of
commands](json-output.md) describes what commands print.
"""
OUTPUT_RULES = """
With `--json` a command prints one document on standard output, and everything else on standard error. The exit codes are
those of [Commands](commands.md). [Types](json-types.md) has the rules for names, units and unknown values, and all types.
"""
TYPE_RULES = """
The objects inside of [JSON files](json-files.md) and of the [output of commands](json-output.md).

- A line has a key, in parentheses its value, and what the key is. `?` after a value: or null. `[]`: a list of such values.
  `{}`: a mapping from names to such values. A key without a value is a text, or a number if its name has a unit or its text
  begins with *Number of*, or a boolean if its text begins with *Whether*.
- A value that is not known is `null` or absent, never 0. A key whose value is its default may be absent. A reader should ignore
  keys that it does not know.
- Names end with their unit: `_s` seconds, `_ms` milliseconds, `_ns` nanoseconds, `_bytes`, `_gib`, `_w` watts, `_pct` percent,
  `_mhz`, `_flops`. `_s` of a moment is seconds since the epoch, except for `t_s`.
- *In order*: a list of these values instead of an object.
- The docstrings in the code say more: search the name of a type.
"""
# So many keys would stand before the pages that explain and help.
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n"
IN_ORDER = "*In order*."
COMMON_RULES = "Keys that many documents have. Where a type names one after *also*, it means this:\n"
VALUE = r"(null|none|empty)\b|(`[^`]*`|[\w-]+): "  # the start of a clause that says what a value means
TYPE = r"\b[A-Z]\w+"  # the name of a type in a value
FILLING = {
    "the",
    "of",
    "a",
    "an",
    "number",
    "in",
    "by",
    "from",
    "it",
    "its",
    "all",
    "this",
    "that",
    "is",
    "are",
    "and",
    "or",
    "to",
    "with",
    "on",
}
FILLING |= {"name", "whether", "one", "per", "for"}
UNITS = {"s": "seconds time duration", "ms": "time duration", "ns": "time duration", "pct": "percent share", "bytes": "size"}
WITH_UNIT = ("s", "ms", "ns", "bytes", "gib", "w", "pct", "mhz", "flops")
UNKNOWN = r"(null|none)(:| if) (it is )?(not known|unknown|not measured)"
UNIT = r"\b(seconds?|bytes?|[GM]iB|percent|Hz|W|ms|ns|hours?|FLOPs?|tokens)\b|%"
LONG = 8  # words
FEWEST_ALIKE = 4  # in so many types a key has the same text before it counts as common


class Line(NamedTuple):
    """A key of a type: its name, its value as the pages show it, and what it is."""

    name: str
    value: str
    text: str


def files() -> str:
    """The content of the page json-files.md."""
    events = ["### Kinds of events\n", "Most of them; a reader should ignore kinds that it does not know.\n"]
    events += [f"- `{name}`: {meaning}" for name, meaning in EVENTS.items()]
    return _documents("JSON files", FILE_RULES, FILES, events)


def output() -> str:
    """The content of the page json-output.md."""
    return _documents("Output of --json", OUTPUT_RULES, COMMANDS, [])


def types() -> str:
    """The content of the page json-types.md: what is common, then each type that is not a document by itself."""
    common = _common()
    parts = [NOT_SEARCHED, "# Types in JSON\n", WRITTEN + TYPE_RULES, "## Common keys\n", COMMON_RULES]
    parts += [_line(line, _links("json-types.md")) for _, line in sorted(common.items())]
    own = _own_types()
    for name, kind in own.items():
        parts += [f"\n## {name}\n", *_about(kind), *_fields(kind, _links("json-types.md"))]
    return "\n".join(parts) + "\n"


@cache
def all_types() -> dict[str, Struct]:
    """Each type that a document contains, by name."""
    found: dict[str, Struct] = {}
    for root in (*USED, *(one.kind for one in (*FILES, *COMMANDS) if one.kind)):
        found |= field_docs.map_nested_structs(root)
    return dict(sorted(found.items()))


@cache
def _inside() -> set[str]:
    """The types that one key alone has as its value: the page describes them below that key."""
    kinds = {name: kind for name, kind in all_types().items() if _same_keys(kind) is None}
    values = [line.value for kind in kinds.values() for line in key_lines(kind)]
    values += [key.value for one in (*FILES, *COMMANDS) for key in one.keys.values()]
    values += [key.value for keys in ALSO.values() for key in keys.values()]
    uses = Counter(name for value in values for name in set(re.findall(TYPE, value)))
    texts = " ".join(key.what for one in (*FILES, *COMMANDS) for key in one.keys.values())
    documents = {one.kind.__name__ for one in (*FILES, *COMMANDS) if one.kind}
    return {
        name
        for name in kinds
        if uses[name] == 1 and name not in MATRIX and name not in documents and name not in re.findall(TYPE, texts)
    }


@cache
def _own_types() -> dict[str, Struct]:
    """The types that have a section: those that are no document by themselves, and that several keys have as their value."""
    documents = {one.kind.__name__ for one in (*FILES, *COMMANDS) if one.kind}
    return {name: kind for name, kind in all_types().items() if name not in documents | _inside() | set(MATRIX)}


@cache
def _common() -> dict[str, Line]:
    """The keys that have the same text and value in several types, by name."""
    lines = Counter(line for kind in all_types().values() for line in key_lines(kind))
    often = {line.name: line for line, count in sorted(lines.items(), key=lambda pair: pair[1]) if count >= FEWEST_ALIKE}
    return {name: line for name, line in often.items() if line.text}


def _links(page: str) -> dict[str, str]:
    """Maps the name of a type to a link to its section. page: the page with the links."""
    home = {name: ("matrix-file.md", name.lower()) for name in MATRIX}
    home |= {name: ("json-types.md", name.lower()) for name in _own_types()}
    for where, documents in (("json-output.md", COMMANDS), ("json-files.md", FILES)):
        home |= {one.kind.__name__: (where, _anchor(one.name)) for one in documents if one.kind}
    return {name: f"[{name}]({'' if where == page else where}#{anchor})" for name, (where, anchor) in home.items()}


def _documents(title: str, rules: str, documents: Sequence[Described], more: list[str]) -> str:
    page = "json-files.md" if documents is FILES else "json-output.md"
    links = _links(page)
    parts = [NOT_SEARCHED, f"# {title}\n", WRITTEN + rules]
    for one in documents:
        parts += [f"## {one.name}\n", f"{_linked(one.about, links)}\n"]
        if one.kind is not None and (one.only or f"](#{_anchor(one.name)})" not in links[one.kind.__name__]):
            names = f" Only these keys: {', '.join(f'`{name}`' for name in one.only)}." if one.only else ""
            parts.append(f"Keys: as {links[one.kind.__name__]}.{names}\n")
        elif one.kind is not None:
            parts += [*_about(one.kind, of_document=True), *_fields(one.kind, links, one.keys)]
        lines = [_hand_written(name, key, links) for name, key in one.keys.items()]
        parts += _listed(lines, links)
        parts.append("")
        if one.kind is Event:
            parts += [*more, ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def _anchor(heading: str) -> str:
    """The anchor that a heading has in the HTML pages of the documentation."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _hand_written(name: str, key: Key, links: dict[str, str]) -> Line:
    value = key.value.removesuffix(" or null") + ("?" if key.value.endswith(" or null") else "")
    value = re.sub(r"^mapping to (\w+)", r"\1{}", value)
    value = re.sub(r"^list of ([\w`]+|\[.*?\]\(.*?\))", r"\1[]", value)
    what = _linked(key.what.removeprefix("the "), links)
    if not key.always and not re.match("only |with |on |at ", what):
        what = f"not always; {what}"
    return Line(name, value, "" if _is_plain(name, what) else what)


def _line(line: Line, links: dict[str, str]) -> str:
    value = "" if _is_clear(line) else f" ({_linked(_cell(line.value), links)})"
    return f"- `{line.name}`{value}" + (f": {_cell(line.text)}" if line.text else "")


def _is_clear(line: Line) -> bool:
    """Whether the name of a key or its text says what kind of value it has, by the rules of the page."""
    if has_unit(line.name) or line.text.lower().startswith("number of "):
        return line.value in ("integer", "number")
    return line.value == ("boolean" if line.text.lower().startswith("whether ") else "text")


def has_unit(name: str) -> bool:
    """Whether the name of a key ends with its unit."""
    return "_" in name and name.rpartition("_")[2] in WITH_UNIT


def _about(kind: Struct, of_document: bool = False) -> list[str]:
    """What stands above the keys of a type. of_document: the description of the document says already what it is."""
    words = [] if of_document else [_short(support_field_texts.summary(kind)).removesuffix(".") + "."]
    words += [IN_ORDER] if kind.__struct_config__.array_like else []
    return [" ".join(words) + "\n"] if words else []


@cache
def key_lines(kind: Struct) -> list[Line]:
    """The keys of a type."""
    _, components = msgspec.json.schema_components([kind], ref_template="{name}")
    texts, described = support_field_texts.of(kind), components[kind.__name__]
    fields = msgspec.structs.fields(kind)
    names = [field.encode_name for field in fields]
    properties = described.get("properties") or dict(zip(names, described["prefixItems"], strict=True))
    lines = [Line(field.encode_name, _value(properties[field.encode_name]), _short(texts[field.name])) for field in fields]
    return [line._replace(text="") if _is_plain(line.name, line.text) else line for line in lines]


def _fields(kind: Struct, links: dict[str, str], replaced: Mapping[str, Key] = {}) -> Iterator[str]:
    """The lines about the keys of a type, with the types inside it below their keys."""
    same = _same_keys(kind)
    if same is not None:
        yield f"- the keys of {links[same]}"
        return
    lines = [line for line in key_lines(kind) if line.name not in replaced]
    lines += [_hand_written(name, key, links) for name, key in ALSO.get(kind, {}).items()]
    if kind is AnyCell:
        keys = MATRIX["CellKeys"]["properties"]
        names = ", ".join(f"`{line.name}`" for line in lines if line.name in keys)
        yield f"- as in [matrix.yaml](matrix-file.md#cellkeys): {names}"
        lines = [line for line in lines if line.name not in keys]
    yield from _listed(lines, links, in_order=kind.__struct_config__.array_like)


def _listed(lines: list[Line], links: dict[str, str], in_order: bool = False) -> Iterator[str]:
    """A line for each key; those that mean what they mean everywhere are in one line at the end."""
    also = [] if in_order else [line for line in lines if _is_common(line)]
    for line in lines:
        if line not in also:
            yield from _nested(line, links)
    if also:
        yield f"- also {', '.join(f'`{line.name}`' for line in also)}"


def _is_common(line: Line) -> bool:
    common = _common().get(line.name)
    return common is not None and (common.value, common.text.lower()) == (line.value, line.text.lower())


def _nested(line: Line, links: dict[str, str]) -> Iterator[str]:
    """The line about a key, and the keys of its value if only this key has such a value."""
    (name,) = set(re.findall(TYPE, line.value)) & _inside() or {""}
    kind = all_types().get(name)
    yield _line(line, links) + (f". {IN_ORDER}" if kind is not None and kind.__struct_config__.array_like else "")
    if kind is not None:
        yield from (f"    {inside}" for inside in _fields(kind, links))


def _same_keys(kind: Struct) -> str | None:
    """The name of the type whose keys this type has, if its docstring says so."""
    named = re.search(r"fields mean the same as those of `(\w+)`", field_docs.join_lines(kind.__doc__ or ""))
    if named is None:
        return None
    assert [line.name for line in key_lines(kind)] == [line.name for line in key_lines(all_types()[named[1]])]
    return named[1]


def _short(text: str) -> str:
    """The first sentence of a text: without reasons, without further clauses unless they say what a value means, and if it is
    still long, without what it says in parentheses or in a relative clause."""
    clause, *more = re.split(r"(?<=[\w)`])\. (?=[A-Z`])", text, maxsplit=1)[0].removesuffix(".").split("; ")
    clause = _begun(_without(r", (so that|so|because|since) .*", clause))
    if len(clause.split()) > LONG:
        clause = _without(r" \([^)\d]*\)|, (which|whose|such as|e\.g\.) [^:]*$", clause)
    values = [one for one in more if re.match(VALUE, one, re.IGNORECASE) and not re.fullmatch(UNKNOWN, one, re.IGNORECASE)]
    return "; ".join([clause, *values])


def _begun(text: str) -> str:
    """The text without an article at its start, with a capital unless it starts with the name of a value."""
    text = re.sub(r"^the ", "", text, flags=re.IGNORECASE)
    return text if re.match(r"[\w-]+( [\w-]+)?: ", text) else text[:1].upper() + text[1:]


def _without(part: str, text: str) -> str:
    """The text without this part (a regular expression), unless the part has a unit."""
    return re.sub(part, lambda match: match[0] if re.search(UNIT, match[0]) else "", text)


def _is_plain(name: str, text: str) -> bool:
    """Whether a text says nothing but the name of the key, so that the page can leave it out."""
    words = {_stem(word) for word in re.findall(r"[a-z]+", text.lower()) if word not in FILLING}
    return words <= {_stem(word) for part in name.split("_") for word in (part, *UNITS.get(part, "").split())}


def _stem(word: str) -> str:
    return re.sub(r"(ies|es|s|ed|e)$", "", word)


def _value(schema: Schema) -> str:
    """The values that a key may have, in words. schema: the JSON Schema of the key."""
    if "$ref" in schema:
        return str(schema["$ref"])
    if "anyOf" in schema:
        values = list(dict.fromkeys(_value(one) for one in schema["anyOf"]))
        some = " or ".join(value for value in values if value != "null")
        return f"{some}?" if "null" in values else some
    if "enum" in schema:
        some = ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
        return f"{some}?" if None in schema["enum"] else some
    kind = schema.get("type")
    if kind == "array":
        return f"{_value(schema['items'])}[]" if isinstance(schema.get("items"), dict) else "list"
    if kind == "object":
        inside = schema.get("additionalProperties")
        return f"{_value(inside)}{{}}" if isinstance(inside, dict) and inside else "mapping"
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
