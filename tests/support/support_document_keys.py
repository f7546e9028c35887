"""Compares the keys of a real document, at any depth, with the description of the document (support_documents.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as types
from support_document import Described, of_type
from support_documents import ALSO, COMMANDS, FILES, USED

from shardlab.files import field_docs

NAMED = {one.name: one for one in (*FILES, *COMMANDS)}
TYPES = {
    name: kind
    for root in (*USED, *(one.kind for one in NAMED.values() if one.kind))
    for name, kind in field_docs.map_nested_structs(root).items()
}
# The keys whose value is a list of objects, for which support_documents.py has a separate description.
INSIDE = {
    ("provision", "nodes"): "nodes of provision",
    ("jobs plan", "cells"): "cells of jobs plan",
    ("collect trace", "ranks"): "ranks of collect trace",
}


def wrong(name: str, document: Any) -> list[str]:
    """The keys of a document that its description does not contain, and the described keys that the document lacks.

    name: the name of the description. If a file has one JSON object per line, each line is passed as a document.
    """
    described = NAMED[name]
    if described.listed:
        assert isinstance(document, list)
        assert document, f"{name}: the list is empty, so nothing is compared"
        return [said for entry in document for said in _object(described, entry)]
    return list(_object(described, document))


def _object(described: Described, value: Any) -> Iterator[str]:
    always, every = described.key_names()
    yield from _keys(described.name, value, always, every)
    for key, inside in value.items():
        if (described.name, key) in INSIDE:
            yield from wrong(INSIDE[described.name, key], inside)
        elif key in described.keys:
            kinds = re.findall(r"\b[A-Z]\w+\b", described.keys[key].value)
            if len(kinds) == 1:
                for entry in inside if isinstance(inside, list) else [inside]:
                    yield from _struct(TYPES[kinds[0]], entry) if entry is not None else ()
        elif described.kind is not None:
            yield from _field(described.kind, key, inside)


def _struct(kind: type[msgspec.Struct], value: Any) -> Iterator[str]:
    always, every = of_type(kind)
    also = ALSO.get(kind, {})
    yield from _keys(kind.__name__, value, always, every | set(also))
    for key, inside in value.items():
        if key not in also:
            yield from _field(kind, key, inside)


def _field(kind: type[msgspec.Struct], key: str, value: Any) -> Iterator[str]:
    field = next((one for one in msgspec.structs.fields(kind) if one.encode_name == key), None)
    if field is not None:
        yield from _typed(types.type_info(field.type), value)


def _typed(kind: types.Type, value: Any) -> Iterator[str]:
    if isinstance(kind, types.UnionType):
        kind = next((one for one in kind.types if isinstance(one, (types.StructType, types.ListType, types.DictType))), kind)
    if isinstance(kind, types.Metadata):
        yield from _typed(kind.type, value)
    elif isinstance(kind, types.StructType) and isinstance(value, dict):
        yield from _struct(kind.cls, value)
    elif isinstance(kind, (types.ListType, types.VarTupleType)) and isinstance(value, list):
        for entry in value:
            yield from _typed(kind.item_type, entry)
    elif isinstance(kind, types.DictType) and isinstance(value, dict):
        for entry in value.values():
            yield from _typed(kind.value_type, entry)


def _keys(where: str, value: dict[str, Any], always: set[str], every: set[str]) -> Iterator[str]:
    yield from (f"{where}: {key} is missing" for key in sorted(always - value.keys()))
    yield from (f"{where}: {key} is not described" for key in sorted(value.keys() - every))
