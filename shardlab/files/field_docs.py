"""Reads the docstring under each field of a type. The JSON Schemas of shardlab describe keys of files with these docstrings.

Python does not keep docstrings of fields at run time, so they are read from the source of the class.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

import msgspec
from msgspec import inspect as types


def of(struct: type[msgspec.Struct]) -> dict[str, str]:
    """For each field of a struct that has a docstring: the name of the field in a file -> the docstring as one line.

    If a subclass documents a field of its base class again, the docstring in the subclass is used.

    Raises OSError if the source of the class cannot be read.
    """
    docs: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            assert isinstance(definition, ast.ClassDef)
            docs |= dict(_documented(definition))
    written = {field.name: field.encode_name for field in msgspec.structs.fields(struct)}
    return {written[name]: text for name, text in docs.items()}


def _documented(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yields (name of the field, its docstring) for each field that has a docstring below it in the source of a class."""
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            text = after.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield field.target.id, " ".join(text.value.split())


def join_lines(docstring: str) -> str:
    """A docstring with each paragraph as one line: the same text on each Python, of which 3.13 removes the indentation."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", docstring.strip()))


def structs(root: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The struct type `root` and all struct types that its fields contain, at any depth, by the names of the types."""
    found: dict[str, type[msgspec.Struct]] = {}
    waiting: list[types.Type] = [types.type_info(root)]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, types.StructType):
            if kind.cls.__name__ in found:
                continue
            found[kind.cls.__name__] = kind.cls
            waiting += [field.type for field in kind.fields]
        elif isinstance(kind, types.UnionType):
            waiting += kind.types
        elif isinstance(kind, types.ListType):
            waiting.append(kind.item_type)
        elif isinstance(kind, types.DictType):
            waiting += [kind.key_type, kind.value_type]
        elif isinstance(kind, types.Metadata):
            waiting.append(kind.type)
    return found
