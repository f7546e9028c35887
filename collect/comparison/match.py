"""Finds the same cells in two matrices, A and B: cells that train the same and differ at most in a few keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.reading.load import LoadedCell
from shardlab.matrix import cell_names
from shardlab.matrix.cell import NEWER_OPTIONS, Role, find_role_keys

# Keys in which two matched cells may differ, because these keys do not change which model is trained on which data. Options are
# not included, because some options belong to the workload and change what is trained.
_MAY_DIFFER_KEYS = find_role_keys(
    Role.NODES, Role.PLATFORM, Role.START, Role.PASSES, Role.EXECUTION, Role.INSTRUMENTS, Role.PRECISION
)
# Keys of a cell that matching ignores: their values follow from other keys, or do not change the training.
_IGNORED_KEYS = {"gpu_batch_size"} | find_role_keys(Role.BOOKKEEPING) - {"rehearses"}
# What a command of the user does is never proven, so another version of its files may be compared, and the output names it.
_MAY_DIFFER_COMMAND_KEYS = _MAY_DIFFER_KEYS | {"workload_code"}
# The values of options that cells of older versions lack.
_DEFAULT_BY_NEWER_OPTION = {f"options.{name}": value for name, value in NEWER_OPTIONS.items()}
_MatchKey = tuple[tuple[str, str], ...]


class KeyDifference(msgspec.Struct, frozen=True):
    """A key whose values differ between A and B, although cells of A are matched with cells of B.

    Cells with equal hashes are matched first. All remaining cells of A have the value `a` of this key, and all remaining cells
    of B have the value `b`.
    """

    key: str
    """The key of a cell."""
    a: Any
    """The value in A."""
    b: Any
    """The value in B."""


class DisjointKey(msgspec.Struct, frozen=True):
    """A key for which A and B have no value in common, so that no cell can be in both."""

    key: str
    """The key of a cell."""
    a: list[Any]
    """The values in the cells of A."""
    b: list[Any]
    """The values in the cells of B."""


class Matches(msgspec.Struct, frozen=True):
    """The result of matching the cells of two matrices, A and B."""

    pairs: list[tuple[LoadedCell, LoadedCell]]
    """(cell of A, the same cell in B)."""
    only_a: list[LoadedCell]
    only_b: list[LoadedCell]
    differs: list[KeyDifference]
    """Keys in which matched cells differ."""


def match_cells(cells_a: Sequence[LoadedCell], cells_b: Sequence[LoadedCell]) -> Matches:
    """Match the cells of two matrices, A and B.

    First, cells with equal hashes are matched (the hash does not include time limit, expected states and proof). Then, of the
    remaining cells, a cell of A and a cell of B are matched if they differ only in the keys that `_find_constant_differences`
    returns, and neither of the two could be matched with another cell in this way.
    """
    cell_b_by_hash = {cell.cell.hash(): cell for cell in cells_b}
    pairs = [(cell, cell_b_by_hash[cell.cell.hash()]) for cell in cells_a if cell.cell.hash() in cell_b_by_hash]
    paired_ids = {cell.id for pair in pairs for cell in pair}
    unmatched_a, unmatched_b = ([cell for cell in cells if cell.id not in paired_ids] for cells in (cells_a, cells_b))
    flat_cells_a, flat_b = ([_flatten_cell(cell) for cell in cells] for cells in (unmatched_a, unmatched_b))
    key_differences = _find_constant_differences(flat_cells_a, flat_b)
    ignored_keys = {difference.key for difference in key_differences}
    keys_a, keys_b = ([_build_match_key(cell, ignored_keys) for cell in flat_cells] for flat_cells in (flat_cells_a, flat_b))
    unique_keys = {key for key, n in Counter(keys_a).items() if n == 1} & {key for key, n in Counter(keys_b).items() if n == 1}
    cell_b_by_key = dict(zip(keys_b, unmatched_b, strict=True))
    near_pairs = [(cell, cell_b_by_key[key]) for cell, key in zip(unmatched_a, keys_a, strict=True) if key in unique_keys]
    return Matches(
        [*pairs, *near_pairs],
        [cell for cell, key in zip(unmatched_a, keys_a, strict=True) if key not in unique_keys],
        [cell for cell, key in zip(unmatched_b, keys_b, strict=True) if key not in unique_keys],
        key_differences if near_pairs else [],
    )


def find_disjoint_keys(matches: Matches) -> list[DisjointKey]:
    """The keys for which the unmatched cells of A and B have no value in common. Each of these keys alone prevents a match."""
    flat_cells_a, flat_cells_b = ([_flatten_cell(cell) for cell in cells] for cells in (matches.only_a, matches.only_b))
    candidate_keys = sorted({key for cell in (*flat_cells_a, *flat_cells_b) for key in cell} - _MAY_DIFFER_KEYS)
    disjoint_keys = []
    for key in candidate_keys:
        values_a, values_b = ({repr(cell.get(key)): cell.get(key) for cell in cells} for cells in (flat_cells_a, flat_cells_b))
        if values_a and values_b and not values_a.keys() & values_b.keys():
            disjoint_keys.append(DisjointKey(key, list(values_a.values()), list(values_b.values())))
    return disjoint_keys


def _find_constant_differences(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[KeyDifference]:
    """The keys that may differ, with one value in all cells of `a` and another value in all cells of `b`."""
    differences = []
    differing_keys = _MAY_DIFFER_COMMAND_KEYS if all(cell["command"] is not None for cell in (*a, *b)) else _MAY_DIFFER_KEYS
    for key in sorted({key for cell in (*a, *b) for key in cell}):
        values = [{repr(cell.get(key)) for cell in cells} for cells in (a, b)]
        if key in differing_keys and len(values[0]) == len(values[1]) == 1 and values[0] != values[1]:
            differences.append(KeyDifference(key, a[0].get(key), b[0].get(key)))
    return differences


def _flatten_cell(cell: LoadedCell) -> dict[str, Any]:
    """The keys of a cell with their values. The keys have the same names as in filters."""
    plain_cell = msgspec.to_builtins(cell.cell)
    flat_cell = cell_names.map_cell_values(plain_cell) | {
        "command": plain_cell["command"],
        "instruments": plain_cell["instruments"],
        "rehearses": plain_cell["rehearses"],
    }
    kept_keys = flat_cell.keys() - _IGNORED_KEYS
    return {
        key: value for key, value in flat_cell.items() if key in kept_keys and _DEFAULT_BY_NEWER_OPTION.get(key, ...) != value
    }


def _build_match_key(flat_cell: Mapping[str, Any], ignored_keys: set[str]) -> _MatchKey:
    return tuple((key, repr(value)) for key, value in sorted(flat_cell.items()) if key not in ignored_keys)
