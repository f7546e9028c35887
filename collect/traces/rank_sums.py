"""Adds up what the traces of several ranks recorded: the time of modules, matrix products, and kernels of attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec

from collect.traces.attention import MOST_KERNELS, AttentionUse
from collect.traces.layers import LayerTime
from collect.traces.matrix_products import MatrixProduct
from collect.traces.rank_analysis import RankAnalysis

_Row = TypeVar("_Row", bound=msgspec.Struct)
_OF_A_LAYER = ("calls", "forward_host_ns", "backward_host_ns", "forward_ns", "backward_ns", "communication_ns")


def layers(ranks: Iterable[RankAnalysis]) -> list[LayerTime]:
    """The time of each module, summed over all ranks, in the order of the modules' first calls.

    A time is None if it is not known for any one of the ranks.
    """
    return _merged((one for rank in ranks for one in rank.layers), lambda one: one.name, _OF_A_LAYER)


def products(ranks: Iterable[RankAnalysis]) -> list[MatrixProduct]:
    """The matrix products of all ranks, added up by operator and sizes, the longest time first."""
    found = _merged(
        (one for rank in ranks for one in rank.products),
        lambda one: (one.operator, one.batch, one.m, one.n, one.k),
        ("calls", "total_ns", "untimed"),
    )
    return sorted(found, key=lambda one: (-one.total_ns, one.operator, one.batch, one.m, one.n, one.k))


def attention(ranks: Iterable[RankAnalysis]) -> list[AttentionUse]:
    """The attention of all ranks, added up by implementation, direction and name, the longest time first."""
    every = [one for rank in ranks for one in rank.attention]
    found = _merged(every, _kind, ("calls", "total_ns"))
    kernels: dict[Hashable, dict[str, None]] = {}
    for one in every:
        kernels.setdefault(_kind(one), {}).update(dict.fromkeys(one.kernels))
    found = [msgspec.structs.replace(one, kernels=list(kernels[_kind(one)])[:MOST_KERNELS]) for one in found]
    return sorted(found, key=lambda one: (-(one.total_ns or 0), one.backend, one.name))


def _kind(one: AttentionUse) -> Hashable:
    return one.backend, one.backward, one.name, one.by


def _merged(every: Iterable[_Row], key: Callable[[_Row], Hashable], fields: Sequence[str]) -> list[_Row]:
    """Merge rows with the same key into one row. The result is in the order in which the keys first occur.

    The values of `fields` are added up. A sum is None if any of its values is None.
    """
    found: dict[Hashable, _Row] = {}
    for one in every:
        before = found.get(key(one))
        if before is not None:
            pairs = {name: (getattr(before, name), getattr(one, name)) for name in fields}
            sums = {name: None if None in pair else sum(pair) for name, pair in pairs.items()}
            found[key(one)] = msgspec.structs.replace(before, **sums)
        else:
            found[key(one)] = one
    return list(found.values())
