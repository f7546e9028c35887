"""Fits the alpha-beta model of a link to the all-reduces that `provision` measured over it.

A ring or a tree of n ranks takes a x alpha + b / B seconds for S bytes, with the factors a and b of `collective_time`. The fit
minimizes the squares of the relative errors over all sizes: small sizes give the latency alpha, large ones the bandwidth B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from jobs.planner.link import PlannedLink
from shardlab.all_reduce import AllReduceTime, MeasuredAllReduce
from shardlab.prediction import PredictedRange

LEAST_SPREAD = 0.10  # of each side of the range, relative: five iterations show less of the spread than a long run
ROUNDS = 8  # assignments of sizes to ring or tree before the last one is used


class FittedLink(msgspec.Struct, frozen=True):
    """The likely latency and bandwidth of a link, and how well they describe the measurement.

    alpha_s: seconds per hop. bandwidth: bus bandwidth in bytes/s. spread: the largest relative difference between the model and
    any measured iteration, at least LEAST_SPREAD.
    """

    alpha_s: float
    bandwidth: float
    spread: float


def fit(measured: MeasuredAllReduce) -> FittedLink | None:
    """The model of a link; None if fewer than two sizes were measured, or if larger sizes took no longer than smaller ones."""
    times = measured.times
    if len({one.bytes for one in times}) < 2:
        return None
    # Gloo uses a ring for every size. NCCL uses the faster algorithm, which depends on the numbers that are fitted.
    trees = [False] * len(times)
    solved = _solve(measured.ranks, times, trees)
    for _ in range(ROUNDS if measured.backend == "nccl" else 0):
        if solved is None:
            break
        chosen = [_seconds(measured.ranks, one.bytes, True, *solved) < _seconds(measured.ranks, one.bytes, False, *solved)
                  for one in times]  # fmt: skip
        if chosen == trees:
            break
        trees = chosen
        solved = _solve(measured.ranks, times, trees)
    if solved is None:
        return None
    errors = [
        abs(measured_s / _seconds(measured.ranks, one.bytes, tree, *solved) - 1)
        for one, tree in zip(times, trees, strict=True)
        for measured_s in (one.fastest_s, one.seconds, one.slowest_s)
    ]
    return FittedLink(solved[0], 1 / solved[1], max(LEAST_SPREAD, *errors))


def link(name: str, measured: Sequence[MeasuredAllReduce]) -> PlannedLink | None:
    """A link with the latency and bandwidth of these measurements; None if none of them can be fitted.

    The range reaches from the slowest to the fastest measurement, such as those of several nodes, with the spread of each; the
    likely values are those of the measurement with the median bandwidth.
    """
    pairs = [(found, one) for one in measured if (found := fit(one)) is not None]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: pair[0].bandwidth)
    middle, whose = pairs[(len(pairs) - 1) // 2]
    bandwidth = PredictedRange(
        min(one.bandwidth / (1 + one.spread) for one, _ in pairs),
        middle.bandwidth,
        max(one.bandwidth * (1 + one.spread) for one, _ in pairs),
    )
    alpha_s = PredictedRange(
        max(one.alpha_s * (1 + one.spread) for one, _ in pairs),
        middle.alpha_s,
        min(one.alpha_s / (1 + one.spread) for one, _ in pairs),
    )
    where = f"{len(whose.nodes)} nodes" if len(whose.nodes) > 1 else f"{whose.ranks} ranks of a node"
    how = f"measured by provision's all-reduce of {where} ({whose.backend}, {whose.measured[:10]})"
    return PlannedLink(name, bandwidth, alpha_s, how)


def _factors(ranks: int, size: int, tree: bool) -> tuple[float, float]:
    """(hops, bytes over the link) of an all-reduce of `size` bytes."""
    if tree:
        return 2 * math.ceil(math.log2(ranks)), 2 * size
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size


def _seconds(ranks: int, size: int, tree: bool, alpha_s: float, beta: float) -> float:
    hops, moved = _factors(ranks, size, tree)
    return hops * alpha_s + moved * beta


def _solve(ranks: int, times: Sequence[AllReduceTime], trees: Sequence[bool]) -> tuple[float, float] | None:
    """(seconds per hop, seconds per byte) with the least squares of relative errors, neither negative; None if a byte takes no
    time."""
    rows = []
    for one, tree in zip(times, trees, strict=True):
        hops, moved = _factors(ranks, one.bytes, tree)
        rows.append((hops / one.seconds, moved / one.seconds))
    hh, hm, mm = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    h, m = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = hh * mm - hm * hm
    if determinant <= 0:
        return None
    alpha_s, beta = (h * mm - m * hm) / determinant, (m * hh - h * hm) / determinant
    if alpha_s < 0:
        alpha_s, beta = 0.0, m / mm
    return (alpha_s, beta) if beta > 0 else None
