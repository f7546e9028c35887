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
_LAYER_TIMES = ("calls", "forward_host_ns", "backward_host_ns", "forward_ns", "backward_ns", "communication_ns")


def sum_layers(ranks: Iterable[RankAnalysis]) -> list[LayerTime]:
    """The time of each module, summed over all ranks, in the order of the modules' first calls.

    A time is None if it is not known for any one of the ranks.
    """
    return _merge_rows((layer for rank in ranks for layer in rank.layers), lambda entry: entry.name, _LAYER_TIMES)


def sum_products(ranks: Iterable[RankAnalysis]) -> list[MatrixProduct]:
    """The matrix products of all ranks, added up by operator and sizes, the longest time first."""
    totals = _merge_rows(
        (product for rank in ranks for product in rank.products),
        lambda entry: (entry.operator, entry.batch, entry.m, entry.n, entry.k),
        ("calls", "total_ns", "untimed"),
    )
    return sorted(totals, key=lambda entry: (-entry.total_ns, entry.operator, entry.batch, entry.m, entry.n, entry.k))


def sum_attention(ranks: Iterable[RankAnalysis]) -> list[AttentionUse]:
    """The attention of all ranks, added up by implementation, direction and name, the longest time first."""
    uses = [use for rank in ranks for use in rank.attention]
    totals = _merge_rows(uses, _attention_key, ("calls", "total_ns"))
    kernels: dict[Hashable, dict[str, None]] = {}
    for use in uses:
        kernels.setdefault(_attention_key(use), {}).update(dict.fromkeys(use.kernels))
    totals = [msgspec.structs.replace(use, kernels=list(kernels[_attention_key(use)])[:MOST_KERNELS]) for use in totals]
    return sorted(totals, key=lambda entry: (-(entry.total_ns or 0), entry.backend, entry.name))


def _attention_key(use: AttentionUse) -> Hashable:
    return use.backend, use.backward, use.name, use.by


def _merge_rows(rows: Iterable[_Row], key: Callable[[_Row], Hashable], fields: Sequence[str]) -> list[_Row]:
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
