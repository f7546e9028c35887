"""Finds the values of a key in all sections of a matrix file, so that a value can be replaced by a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardlab.files.document import KeyPath


def find_values(sections: dict[str, Any], key: str) -> Iterator[tuple[Any, str | int, KeyPath]]:
    """Find each value of a key in a matrix file. sections: its `defaults`, `axes`, `zip`, `include` and `exclude`.

    Yields (the mapping or list that contains the value, its key or index there, its path in the matrix file).
    """
    if key in sections["defaults"]:
        yield sections["defaults"], key, ("defaults", key)
    axis_groups: list[tuple[KeyPath, dict[str, list[Any]]]] = [(("axes",), sections["axes"])]
    axis_groups += [(("zip", entry_index), axis_group) for entry_index, axis_group in enumerate(sections["zip"])]
    for path, axis_group in axis_groups:
        for index in range(len(axis_group.get(key, []))):
            yield axis_group[key], index, (*path, key, index)
    for section in ("include", "exclude"):
        for entry_index, entry in enumerate(sections[section]):
            if key in entry:
                yield entry, key, (section, entry_index, key)
