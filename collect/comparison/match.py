"""Finds the same cells in two matrices, A and B: cells that train the same and differ at most in a few keys.

The output of the comparison names the keys in which they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.reading.load import LoadedCell
from shardlab.matrix import cell_names
from shardlab.matrix.cell import Role, keys_of

# Keys in which two matched cells may differ, because these keys do not change which model is trained on which data. Options are
# not included, because some options belong to the workload and change what is trained.
_MAY_DIFFER = keys_of(Role.NODES, Role.HARDWARE, Role.START, Role.PASSES, Role.EXECUTION, Role.INSTRUMENTS, Role.PRECISION)
# Keys of a cell that matching ignores: their values follow from other keys, or do not change the training.
_LEFT_OUT = {"gpu_batch_size"} | keys_of(Role.BOOKKEEPING) - {"rehearses"}
_Key = tuple[tuple[str, str], ...]


class Differs(msgspec.Struct, frozen=True):
    """A key whose values differ between A and B, although cells of A are matched with cells of B.

    Cells with equal hashes are matched first. All remaining cells of A have the value `a` of this key, and all remaining cells
    of B have the value `b`.
    """

    key: str  # the key of a cell
    a: Any  # the value in A
    b: Any  # the value in B


class Apart(msgspec.Struct, frozen=True):
    """A key for which A and B have no value in common, so that no cell can be in both."""

    key: str  # the key of a cell
    a: list[Any]  # the values in the cells of A
    b: list[Any]  # the values in the cells of B


class Matches(msgspec.Struct, frozen=True):
    """The result of matching the cells of two matrices, A and B."""

    pairs: list[tuple[LoadedCell, LoadedCell]]  # (cell of A, the same cell in B)
    only_a: list[LoadedCell]  # cells of A without a match
    only_b: list[LoadedCell]  # cells of B without a match
    differs: list[Differs]  # keys in which matched cells differ


def match(a: Sequence[LoadedCell], b: Sequence[LoadedCell]) -> Matches:
    """Match the cells of two matrices, A and B.

    First, cells with equal hashes are matched (the hash does not include time limit, expected states and proof). Then, of the
    remaining cells, a cell of A and a cell of B are matched if they differ only in the keys that `_throughout` returns, and
    neither of the two could be matched with another cell in this way.
    """
    theirs = {cell.cell.hash(): cell for cell in b}
    pairs = [(cell, theirs[cell.cell.hash()]) for cell in a if cell.cell.hash() in theirs]
    paired = {cell.id for pair in pairs for cell in pair}
    rest_a, rest_b = ([cell for cell in cells if cell.id not in paired] for cells in (a, b))
    differs = _throughout([_flat(cell) for cell in rest_a], [_flat(cell) for cell in rest_b])
    ignored = {one.key for one in differs}
    keys_a, keys_b = ([_key(_flat(cell), ignored) for cell in cells] for cells in (rest_a, rest_b))
    alone = {key for key, n in Counter(keys_a).items() if n == 1} & {key for key, n in Counter(keys_b).items() if n == 1}
    twins = dict(zip(keys_b, rest_b, strict=True))
    more = [(cell, twins[key]) for cell, key in zip(rest_a, keys_a, strict=True) if key in alone]
    return Matches(
        [*pairs, *more],
        [cell for cell, key in zip(rest_a, keys_a, strict=True) if key not in alone],
        [cell for cell, key in zip(rest_b, keys_b, strict=True) if key not in alone],
        differs if more else [],
    )


def apart(found: Matches) -> list[Apart]:
    """The keys for which the unmatched cells of A and B have no value in common. Each of these keys alone prevents a match."""
    a, b = ([_flat(cell) for cell in cells] for cells in (found.only_a, found.only_b))
    keys = sorted({key for cell in (*a, *b) for key in cell} - _MAY_DIFFER)
    keys_apart = []
    for key in keys:
        ours, theirs = ({repr(cell.get(key)): cell.get(key) for cell in cells} for cells in (a, b))
        if ours and theirs and not ours.keys() & theirs.keys():
            keys_apart.append(Apart(key, list(ours.values()), list(theirs.values())))
    return keys_apart


def _throughout(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[Differs]:
    # Finds the keys in _MAY_DIFFER that have the same value in all cells of `a`, and another value in all cells of `b`.
    found = []
    for key in sorted({key for cell in (*a, *b) for key in cell}):
        values = [{repr(cell.get(key)) for cell in cells} for cells in (a, b)]
        if key in _MAY_DIFFER and len(values[0]) == len(values[1]) == 1 and values[0] != values[1]:
            found.append(Differs(key, a[0].get(key), b[0].get(key)))
    return found


def _flat(cell: LoadedCell) -> dict[str, Any]:
    """The keys of a cell with their values. The keys have the same names as in filters."""
    plain = msgspec.to_builtins(cell.cell)
    flat = cell_names.names(plain) | {"instruments": plain["instruments"], "rehearses": plain["rehearses"]}
    return {key: value for key, value in flat.items() if key not in _LEFT_OUT}


def _key(flat: Mapping[str, Any], ignored: set[str]) -> _Key:
    return tuple((key, repr(value)) for key, value in sorted(flat.items()) if key not in ignored)
