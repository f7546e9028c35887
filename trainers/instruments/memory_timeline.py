"""Computes curves of memory by category during a step, from the changes of storages. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

# The order of the categories in files and reports.
CATEGORIES = {
    "parameter": "the weights that this rank keeps from step to step",
    "gathered": "weights for computing: gathered from the ranks that keep them, or copied in 16 bits",
    "gradient": "gradients that the optimizer reads",
    "optimizer_state": "the optimizer's state, such as momentum",
    "master_parameter": "the optimizer's own copy of the weights",
    "activation": "results of forward (or of its recomputation) that are kept for backward",
    "buffer": "other memory that is kept from step to step: DDP's buckets, buffers of modules, the batch",
    "temporary": "all other memory: intermediate results, gradients before the optimizer reads them, buffers of collectives",
}
MOST_POINTS = 1000


class Timeline(msgspec.Struct, frozen=True):
    """Memory during a step, in bytes by category."""

    peak_t_ms: float
    """The time of the peak."""
    peak_phase: str
    """The phase of the peak."""
    peak: dict[str, int]
    """At the time when the sum of all categories was largest."""
    most: dict[str, int]
    """The largest value of each category; different categories may reach it at different times."""
    start: dict[str, int]
    """Before the step."""
    end: dict[str, int]
    """After the step."""
    t_ms: list[float]
    """The times of the points of the curves in ms, at most MOST_POINTS. If there were more changes, each point stands for
    several consecutive changes and has the values of the change with the largest sum."""
    phase: list[str]
    """The phase at each point."""
    points: dict[str, list[int]]
    """The bytes at each point, by category."""


def compute_timeline(changes: Sequence[tuple[float, str, int, int]], find_category: Callable[[int], str]) -> Timeline:
    """Compute the curves of a step.

    changes: (seconds since the start of the step, phase, number of the storage, added bytes; negative if released). Storages
    that existed before the step have a change at 0 s. find_category: returns the category of a storage by its number.
    """
    category_names = list(CATEGORIES)
    category_index = {name: index for index, name in enumerate(category_names)}
    category_bytes = [0] * len(category_names)
    curve_rows: list[tuple[float, str, list[int]]] = [(0.0, "outside", category_bytes)]
    for t_s, phase, storage_number, nbytes in sorted(changes, key=lambda change: change[0]):
        category_bytes = list(category_bytes)
        category_bytes[category_index[find_category(storage_number)]] += nbytes
        curve_row = (t_s * 1000, phase, category_bytes)
        if t_s == 0.0:
            curve_rows[0] = curve_row
        else:
            curve_rows.append(curve_row)
    t_ms, phase, peak_bytes = max(curve_rows, key=_sum_bytes)
    thinned_rows = _thin_rows(curve_rows)

    def group_by_category(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(category_names, values, strict=True))

    return Timeline(
        peak_t_ms=t_ms,
        peak_phase=phase,
        peak=group_by_category(peak_bytes),
        most=group_by_category([max(curve_row[2][index] for curve_row in curve_rows) for index in range(len(category_names))]),
        start=group_by_category(curve_rows[0][2]),
        end=group_by_category(curve_rows[-1][2]),
        t_ms=[round(curve_row[0], 4) for curve_row in thinned_rows],
        phase=[curve_row[1] for curve_row in thinned_rows],
        points=group_by_category([[curve_row[2][index] for curve_row in thinned_rows] for index in range(len(category_names))]),
    )


def _thin_rows(curve_rows: Sequence[tuple[float, str, list[int]]]) -> list[tuple[float, str, list[int]]]:
    """Reduce rows to at most MOST_POINTS: the first row, the last row, and, of each group of consecutive rows between them, the
    row with the largest sum."""
    inner_rows = curve_rows[1:-1]
    group_size = -(-len(inner_rows) // (MOST_POINTS - 2)) or 1
    row_groups = [inner_rows[first : first + group_size] for first in range(0, len(inner_rows), group_size)]
    return [curve_rows[0], *(max(group, key=_sum_bytes) for group in row_groups), *curve_rows[-1:][: len(curve_rows) - 1]]


def _sum_bytes(curve_row: tuple[float, str, list[int]]) -> int:
    return sum(curve_row[2])
