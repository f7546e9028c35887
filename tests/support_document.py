"""The parts of which descriptions of JSON documents consist (support_documents.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

Struct = type[msgspec.Struct]


class Key(NamedTuple):
    """A key of a document that no type describes. value: what it holds, with names of types. always: never absent."""

    value: str
    what: str
    always: bool = True


class Described(NamedTuple):
    """A document.

    keys: by hand, for what no type describes; they replace fields of the type.
    kind: the type of the document, or of the entries of a list.
    listed: whether the document is a list of such objects. only: the fields that it has, if not all.
    """

    name: str
    about: str
    kind: Struct | None = None
    keys: Mapping[str, Key] = {}
    listed: bool = False
    only: tuple[str, ...] = ()

    def key_names(self) -> tuple[set[str], set[str]]:
        """(the keys that are always there, all keys)."""
        always, every = of_type(self.kind) if self.kind else (set(), set())
        if self.only:
            always, every = always & set(self.only), every & set(self.only)
        return (always - set(self.keys)) | {name for name, key in self.keys.items() if key.always}, every | set(self.keys)


def of_type(kind: Struct) -> tuple[set[str], set[str]]:
    """(the fields that are always in the JSON of a type, all fields)."""
    fields = msgspec.structs.fields(kind)
    every = {field.encode_name for field in fields}
    return ({field.encode_name for field in fields if field.required} if kind.__struct_config__.omit_defaults else every), every
