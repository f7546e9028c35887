"""The types with which support_documents.py describes JSON documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

Struct = type[msgspec.Struct]


class Key(NamedTuple):
    """A key of a JSON document that is not a field of a type in the code.

    value: the type of its value in words. always: whether every document has the key.
    """

    value: str
    what: str
    always: bool = True


class Described(NamedTuple):
    """The description of a JSON document.

    keys: keys that are described by hand, because `kind` has no such field or its field has no good description.
    kind: the type of the document, or of its entries if the document is a list.
    listed: whether the document is a list of such objects. only: the fields of `kind` that the document has, if not all.
    """

    name: str
    about: str
    kind: Struct | None = None
    keys: Mapping[str, Key] = {}
    listed: bool = False
    only: tuple[str, ...] = ()

    def key_names(self) -> tuple[set[str], set[str]]:
        """(the keys that the document always has, all keys that the document can have)."""
        always, every = of_type(self.kind) if self.kind else (set(), set())
        if self.only:
            always, every = always & set(self.only), every & set(self.only)
        return (always - set(self.keys)) | {name for name, key in self.keys.items() if key.always}, every | set(self.keys)


def of_type(kind: Struct) -> tuple[set[str], set[str]]:
    """(the fields of a type that its JSON always contains, all fields of the type)."""
    fields = msgspec.structs.fields(kind)
    every = {field.encode_name for field in fields}
    return ({field.encode_name for field in fields if field.required} if kind.__struct_config__.omit_defaults else every), every
