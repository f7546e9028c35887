"""Adds up what the traces of several ranks recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec

_Row = TypeVar("_Row", bound=msgspec.Struct)


def merge_rows(rows: Iterable[_Row], key: Callable[[_Row], Hashable], fields: Sequence[str]) -> list[_Row]:
    """Merge rows with the same key into one row. The result is in the order in which the keys first occur.

    The values of `fields` are added up. A sum is None if any of its values is None.
    """
    row_of_key: dict[Hashable, _Row] = {}
    for row in rows:
        earlier = row_of_key.get(key(row))
        if earlier is not None:
            pairs = {name: (getattr(earlier, name), getattr(row, name)) for name in fields}
            sums = {name: None if None in pair else sum(pair) for name, pair in pairs.items()}
            row_of_key[key(row)] = msgspec.structs.replace(earlier, **sums)
        else:
            row_of_key[key(row)] = row
    return list(row_of_key.values())
