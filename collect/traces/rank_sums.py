"""Adds up what the traces of several ranks recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec

_Row = TypeVar("_Row", bound=msgspec.Struct)


def merge_rows(rows: Iterable[_Row], get_key: Callable[[_Row], Hashable], summed_fields: Sequence[str]) -> list[_Row]:
    """Merge rows with the same key into one row. The result is in the order in which the keys first occur.

    The values of `summed_fields` are added up. A sum is None if any of its values is None.
    """
    row_by_key: dict[Hashable, _Row] = {}
    for row in rows:
        sum_so_far = row_by_key.get(get_key(row))
        if sum_so_far is not None:
            value_pairs = {name: (getattr(sum_so_far, name), getattr(row, name)) for name in summed_fields}
            summed_values = {name: None if None in pair else sum(pair) for name, pair in value_pairs.items()}
            row_by_key[get_key(row)] = msgspec.structs.replace(sum_so_far, **summed_values)
        else:
            row_by_key[get_key(row)] = row
    return list(row_by_key.values())
