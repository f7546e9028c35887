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
MOST_CHANGES = 8  # after this many changes between ring and tree, the choice is not changed again


class FittedLink(msgspec.Struct, frozen=True):
    """The likely latency and bandwidth of a link, and how well they describe the measurement."""

    alpha_s: float
    """Seconds per hop."""
    bytes_per_s: float
    """Bus bandwidth in bytes/s."""
    relative_spread: float
    """The largest relative difference between the model and any measured iteration, at least LEAST_SPREAD."""


def fit_all_reduce(all_reduce: MeasuredAllReduce) -> FittedLink | None:
    """Fit the model of a link to a measurement; None if the measurement does not determine it, for example because the largest
    size took no longer than the smallest."""
    ranks, small_timing, large_timing = all_reduce.ranks, all_reduce.times[0], all_reduce.times[-1]
    # Gloo uses a ring for every size. NCCL uses the faster algorithm, which depends on the numbers that are fitted.
    tree_choices = (False, False)
    alpha_beta = _fit_alpha_beta(ranks, small_timing, large_timing, tree_choices)
    for _ in range(MOST_CHANGES if all_reduce.backend == "nccl" else 0):
        if (
            alpha_beta is None
            or (
                chosen_trees := (
                    _is_tree_faster(ranks, small_timing, alpha_beta),
                    _is_tree_faster(ranks, large_timing, alpha_beta),
                )
            )
            == tree_choices
        ):
            break
        tree_choices = chosen_trees
        alpha_beta = _fit_alpha_beta(ranks, small_timing, large_timing, tree_choices)
    if alpha_beta is None:
        return None
    relative_errors = [
        abs(
            measured_s
            / _predict_all_reduce_s(
                ranks, timing.bytes, all_reduce.backend == "nccl" and _is_tree_faster(ranks, timing, alpha_beta), *alpha_beta
            )
            - 1
        )
        for timing in all_reduce.times
        for measured_s in (timing.fastest_s, timing.seconds, timing.slowest_s)
    ]
    return FittedLink(alpha_beta[0], 1 / alpha_beta[1], max(LEAST_SPREAD, *relative_errors))


def fit_link(link_name: str, all_reduces: Sequence[MeasuredAllReduce]) -> PlannedLink | None:
    """A link with the latency and bandwidth of these measurements; None if no measurement can be fitted.

    The range reaches from the slowest to the fastest measurement (several nodes may have been measured), each widened by its
    own spread. The likely values come from the measurement with the median bandwidth.
    """
    fitted_pairs = [(fit, all_reduce) for all_reduce in all_reduces if (fit := fit_all_reduce(all_reduce)) is not None]
    if not fitted_pairs:
        return None
    fitted_pairs.sort(key=lambda fitted_pair: fitted_pair[0].bytes_per_s)
    median_link, median_measurement = fitted_pairs[(len(fitted_pairs) - 1) // 2]
    bytes_per_s = PredictedRange(
        min(fitted_link.bytes_per_s / (1 + fitted_link.relative_spread) for fitted_link, _ in fitted_pairs),
        median_link.bytes_per_s,
        max(fitted_link.bytes_per_s * (1 + fitted_link.relative_spread) for fitted_link, _ in fitted_pairs),
    )
    alpha_s = PredictedRange(
        max(fitted_link.alpha_s * (1 + fitted_link.relative_spread) for fitted_link, _ in fitted_pairs),
        median_link.alpha_s,
        min(fitted_link.alpha_s / (1 + fitted_link.relative_spread) for fitted_link, _ in fitted_pairs),
    )
    ranks_text = (
        f"{len(median_measurement.nodes)} nodes"
        if len(median_measurement.nodes) > 1
        else f"{median_measurement.ranks} ranks of a node"
    )
    source_text = (
        f"measured by provision's all-reduce of {ranks_text} ({median_measurement.backend}, {median_measurement.measured[:10]})"
    )
    return PlannedLink(link_name, bytes_per_s, alpha_s, source_text)


def _compute_time_factors(group_size: int, tensor_bytes: int, uses_tree: bool) -> tuple[float, float]:
    """The factors of latency and time per byte in the time of an all-reduce of `tensor_bytes` bytes: (number of hops, bytes
    over the link)."""
    if uses_tree:
        return 2 * math.ceil(math.log2(group_size)), 2 * tensor_bytes
    return 2 * (group_size - 1), 2 * (group_size - 1) / group_size * tensor_bytes


def _predict_all_reduce_s(group_size: int, tensor_bytes: int, uses_tree: bool, alpha_s: float, s_per_byte: float) -> float:
    hop_count, moved_bytes = _compute_time_factors(group_size, tensor_bytes, uses_tree)
    return hop_count * alpha_s + moved_bytes * s_per_byte


def _is_tree_faster(group_size: int, timing: AllReduceTime, alpha_beta: tuple[float, float]) -> bool:
    """Whether a tree is faster than a ring for tensors of this size."""
    return _predict_all_reduce_s(group_size, timing.bytes, True, *alpha_beta) < _predict_all_reduce_s(
        group_size, timing.bytes, False, *alpha_beta
    )


def _fit_alpha_beta(
    group_size: int, small_timing: AllReduceTime, large_timing: AllReduceTime, tree_choices: tuple[bool, bool]
) -> tuple[float, float] | None:
    """Solve for (seconds per hop, at least 0; seconds per byte) so that the model gives the measured times of both sizes. None
    if there is no solution, or if a byte would take no time. tree_choices: whether the small size and the large size use a
    tree."""
    (small_hops, small_bytes), (large_hops, large_bytes) = (
        _compute_time_factors(group_size, timing.bytes, uses_tree)
        for timing, uses_tree in zip((small_timing, large_timing), tree_choices, strict=True)
    )
    determinant = small_hops * large_bytes - large_hops * small_bytes
    if determinant <= 0:
        return None
    s_per_byte = (small_hops * large_timing.seconds - large_hops * small_timing.fastest_s) / determinant
    alpha_s = (small_timing.fastest_s - small_bytes * s_per_byte) / small_hops
    if alpha_s < 0:
        alpha_s, s_per_byte = 0.0, large_timing.seconds / large_bytes
    return (alpha_s, s_per_byte) if s_per_byte > 0 else None
