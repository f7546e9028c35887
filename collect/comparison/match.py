"""Finds the same cells in two matrices: they train the same and may differ only in a few keys, which the output names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.loading.load import LoadedCell
from shardlab import cell_names
from shardlab.cell import Role, keys_of

# What a whole matrix may have otherwise than another while its cells are still the same cells, trained by other means. Options
# are not among it: some are a workload's, and make other work.
_MAY_DIFFER = keys_of(Role.NODES, Role.HARDWARE, Role.START, Role.PASSES, Role.EXECUTION, Role.INSTRUMENTS, Role.PRECISION)
# What follows from other keys, and what changes no work.
_LEFT_OUT = {"gpu_batch_size"} | keys_of(Role.BOOKKEEPING) - {"rehearses"}
_Key = tuple[tuple[str, str], ...]


class Differs(msgspec.Struct, frozen=True):
    """A key that has one value in all cells of A without a match, and another value in all such cells of B."""

    key: str
    a: Any
    b: Any


class Apart(msgspec.Struct, frozen=True):
    """A key of which the cells of A have other values than those of B: by it alone no cell is in both. a, b: the values."""

    key: str
    a: list[Any]
    b: list[Any]


class Matches(msgspec.Struct, frozen=True):
    """pairs: the same cell in A and B. only_a, only_b: cells without a match. differs: keys in which paired cells differ."""

    pairs: list[tuple[LoadedCell, LoadedCell]]
    only_a: list[LoadedCell]
    only_b: list[LoadedCell]
    differs: list[Differs]


def match(a: Sequence[LoadedCell], b: Sequence[LoadedCell]) -> Matches:
    """First match cells of equal hash (it does not cover time limit, expected end and proof); then match the remaining cells
    that differ only in keys of `_throughout`, if the match is unique in A and in B."""
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
    """What keeps the cells of A from being cells of B, if there is no pair; nothing if it is not one key alone."""
    a, b = ([_flat(cell) for cell in cells] for cells in (found.only_a, found.only_b))
    keys = sorted({key for cell in (*a, *b) for key in cell} - _MAY_DIFFER)
    told = []
    for key in keys:
        ours, theirs = ({repr(cell.get(key)): cell.get(key) for cell in cells} for cells in (a, b))
        if ours and theirs and not ours.keys() & theirs.keys():
            told.append(Apart(key, list(ours.values()), list(theirs.values())))
    return told


def _throughout(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[Differs]:
    found = []
    for key in sorted({key for cell in (*a, *b) for key in cell}):
        values = [{repr(cell.get(key)) for cell in cells} for cells in (a, b)]
        if key in _MAY_DIFFER and len(values[0]) == len(values[1]) == 1 and values[0] != values[1]:
            found.append(Differs(key, a[0].get(key), b[0].get(key)))
    return found


def _flat(cell: LoadedCell) -> dict[str, Any]:
    """By the names that filters have for them."""
    plain = msgspec.to_builtins(cell.cell)
    flat = cell_names.names(plain) | {"instruments": plain["instruments"], "rehearses": plain["rehearses"]}
    return {key: value for key, value in flat.items() if key not in _LEFT_OUT}


def _key(flat: Mapping[str, Any], ignored: set[str]) -> _Key:
    return tuple((key, repr(value)) for key, value in sorted(flat.items()) if key not in ignored)
