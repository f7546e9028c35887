"""Reads what the source says about the fields of a type: below, beside or above the field, or in the docstring of the class."""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable

import msgspec

from shardlab.files import field_docs

# Texts about fields that mean the same in every document. A text in the source of the type replaces them.
EVERYWHERE = {
    "schema": "version of the format of this document",
    "run_id": "id of the run, which is the name of its folder",
    "run": "id of the run",
    "matrix": "name of the matrix",
    "title": "title of the matrix",
    "cell": "id of the cell",
    "baseline": "what the cells are compared with: a strategy, or the id of a cell",
    "rehearsal": "whether the runs were a rehearsal, whose times say nothing about speed",
    "world": "number of processes",
    "versions": "name of a package -> its version",
    "t_s": "seconds of the monotonic clock, since boot",
    "wall_s": "seconds since the epoch",
    "host": "host name",
    "boot_id": "changes at each boot of the machine",
    "rank": "number of the rank, from 0",
    "metric": "name of the metric",
    "collective": "name of the collective, such as all_reduce",
    "unit": "unit of the numbers beside it",
    "state": "state of the run",
    "why": "the reason, in words",
    "mac": "hardware address",
    "pci": "address on the PCI bus",
    "uuid": "NVML's id of the GPU",
    "lease": "null: the machines are not lent for a time",
}
_NAMES = r"`?[a-z_]\w*`?(?:,? (?:and )?`?[a-z_]\w*`?)*"


def of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text about each field of a type; a field about which the source says nothing is missing."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            source = textwrap.dedent(inspect.getsource(base))
            (definition,) = ast.parse(source).body
            assert isinstance(definition, ast.ClassDef)
            names = [node.target.id for node in definition.body if isinstance(node, ast.AnnAssign)]
            texts |= _of_docstring(ast.get_docstring(definition) or "", names)
            texts |= _of_comments(source, definition)
    texts |= field_docs.read_field_docs(kind)
    fields = [field.name for field in msgspec.structs.fields(kind)]
    return {name: texts.get(name) or EVERYWHERE[name] for name in fields if name in texts or name in EVERYWHERE}


def summary(kind: type[msgspec.Struct]) -> str:
    """The first paragraph of the docstring of a type, without texts about its fields."""
    text = field_docs.join_lines(kind.__doc__ or "").split("\n\n")[0]
    names = {field.name for field in msgspec.structs.fields(kind)}
    for match in re.finditer(rf"({_NAMES}): ", text):
        if set(_split(match[1])) <= names:
            return text[: match.start()].strip()
    return text


def _split(names: str) -> list[str]:
    return re.findall(r"[a-z_]\w*", re.sub(r"\band\b", "", names))


def _of_docstring(text: str, names: Iterable[str]) -> dict[str, str]:
    """The entries `name: text` and `name, name: text` of a docstring. An entry ends at the next entry or at an empty line."""
    found: dict[str, str] = {}
    for paragraph in text.split("\n\n"):
        joined = " ".join(paragraph.split())
        entries = [
            match for match in re.finditer(rf"(?:^|(?<=[.;] ))({_NAMES}): ", joined) if set(_split(match[1])) <= set(names)
        ]
        ends = [entry.start() for entry in entries[1:]] + [len(joined)]
        for entry, end in zip(entries, ends, strict=False):
            said = joined[entry.end() : end].strip()
            found |= dict.fromkeys(_split(entry[1]), said)
    return found


def _of_comments(source: str, definition: ast.ClassDef) -> dict[str, str]:
    """The comment beside each field, or else the comment lines right above the field."""
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    found = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = [comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            above = [comments[line] for line in range(first, node.lineno)]
            if beside or above:
                found[node.target.id] = " ".join(beside or above)
    return found
