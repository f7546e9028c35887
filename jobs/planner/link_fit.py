"""Fits the alpha-beta model of a link to the all-reduces that `provision` measured over this link.

An all-reduce over n ranks in a ring or a tree takes a x alpha + b / B seconds, with the factors a and b of `step_time`.
The measurements of the smallest and the largest tensor give the latency alpha and the bandwidth B. The measurements of the
sizes in between only widen the range, because buffers of a network or a library make them faster or slower than the model. For
the smallest tensor, only the fastest iteration is used: if a processor is busy for a moment, the delay is longer than the
latency of any network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from jobs.planner.link import PlannedLink
from shardlab.cluster.all_reduce import AllReduceTime, MeasuredAllReduce
from shardlab.runs.prediction import PredictedRange

LEAST_SPREAD = 0.10  # the smallest spread of a link, because a short measurement does not show how much the times vary
ROUNDS = 8  # after this many changes between ring and tree, the choice is not changed again


class FittedLink(msgspec.Struct, frozen=True):
    """The likely latency and bandwidth of a link, and how well they describe the measurement."""

    alpha_s: float
    """Seconds per hop."""
    bandwidth: float
    """Bus bandwidth in bytes/s."""
    spread: float
    """The largest relative difference between the model and any measured iteration, at least LEAST_SPREAD."""


def fit_measurement(result: MeasuredAllReduce) -> FittedLink | None:
    """Fit the model of a link to a measurement; None if the measurement does not determine it, for example because the largest
    size took no longer than the smallest."""
    ranks, small, large = result.ranks, result.times[0], result.times[-1]
    # Gloo uses a ring for every size. NCCL uses the faster algorithm, which depends on the numbers that are fitted.
    trees = (False, False)
    fit = _fit_alpha_beta(ranks, small, large, trees)
    for _ in range(ROUNDS if result.backend == "nccl" else 0):
        if fit is None or (chosen_trees := (_is_tree_faster(ranks, small, fit), _is_tree_faster(ranks, large, fit))) == trees:
            break
        trees = chosen_trees
        fit = _fit_alpha_beta(ranks, small, large, trees)
    if fit is None:
        return None
    errors = [
        abs(
            measured_s
            / _all_reduce_seconds(ranks, timing.bytes, result.backend == "nccl" and _is_tree_faster(ranks, timing, fit), *fit)
            - 1
        )
        for timing in result.times
        for measured_s in (timing.fastest_s, timing.seconds, timing.slowest_s)
    ]
    return FittedLink(fit[0], 1 / fit[1], max(LEAST_SPREAD, *errors))


def fit_link(name: str, all_reduces: Sequence[MeasuredAllReduce]) -> PlannedLink | None:
    """A link with the latency and bandwidth of these measurements; None if no measurement can be fitted.

    The range reaches from the slowest to the fastest measurement (several nodes may have been measured), each widened by its
    own spread. The likely values come from the measurement with the median bandwidth.
    """
    pairs = [(fit, entry) for entry in all_reduces if (fit := fit_measurement(entry)) is not None]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: pair[0].bandwidth)
    median_link, median = pairs[(len(pairs) - 1) // 2]
    bandwidth = PredictedRange(
        min(entry.bandwidth / (1 + entry.spread) for entry, _ in pairs),
        median_link.bandwidth,
        max(entry.bandwidth * (1 + entry.spread) for entry, _ in pairs),
    )
    alpha_s = PredictedRange(
        max(entry.alpha_s * (1 + entry.spread) for entry, _ in pairs),
        median_link.alpha_s,
        min(entry.alpha_s / (1 + entry.spread) for entry, _ in pairs),
    )
    ranks_text = f"{len(median.nodes)} nodes" if len(median.nodes) > 1 else f"{median.ranks} ranks of a node"
    source_text = f"measured by provision's all-reduce of {ranks_text} ({median.backend}, {median.measured[:10]})"
    return PlannedLink(name, bandwidth, alpha_s, source_text)


def _time_factors(group_size: int, size: int, tree: bool) -> tuple[float, float]:
    """The factors of latency and time per byte in the time of an all-reduce of `size` bytes: (number of hops, bytes over the
    link)."""
    if tree:
        return 2 * math.ceil(math.log2(group_size)), 2 * size
    return 2 * (group_size - 1), 2 * (group_size - 1) / group_size * size


def _all_reduce_seconds(group_size: int, size: int, tree: bool, alpha_s: float, beta: float) -> float:
    hops, moved = _time_factors(group_size, size, tree)
    return hops * alpha_s + moved * beta


def _is_tree_faster(group_size: int, timing: AllReduceTime, fit: tuple[float, float]) -> bool:
    """Whether a tree is faster than a ring for tensors of this size."""
    return _all_reduce_seconds(group_size, timing.bytes, True, *fit) < _all_reduce_seconds(
        group_size, timing.bytes, False, *fit
    )


def _fit_alpha_beta(
    group_size: int, small: AllReduceTime, large: AllReduceTime, trees: tuple[bool, bool]
) -> tuple[float, float] | None:
    """Solve for (seconds per hop, at least 0; seconds per byte) so that the model gives the measured times of both sizes. None
    if there is no solution, or if a byte would take no time. trees: whether the small size and the large size use a tree."""
    (hops, moved), (hops_large, moved_large) = (
        _time_factors(group_size, timing.bytes, tree) for timing, tree in zip((small, large), trees, strict=True)
    )
    determinant = hops * moved_large - hops_large * moved
    if determinant <= 0:
        return None
    beta = (hops * large.seconds - hops_large * small.fastest_s) / determinant
    alpha_s = (small.fastest_s - moved * beta) / hops
    if alpha_s < 0:
        alpha_s, beta = 0.0, large.seconds / moved_large
    return (alpha_s, beta) if beta > 0 else None
