"""Metrics of collectives, and of the parts of the profiled time in percent.

Percentages of ranks can be compared even if the ranks have different speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import WORK_KINDS, Direction, Metric, Reads
from collect.metric_values import average_ms_per_step, average_over_ranks, average_per_step

if TYPE_CHECKING:
    from collect.traces.breakdown import Breakdown


def count_collectives(run: LoadedRun) -> Quantity | None:
    """The number of collectives per step, as the mean over the ranks that were profiled by steps; None if there is no such
    rank."""
    return average_per_step(run.breakdowns, lambda breakdown: sum(tally.count for tally in breakdown.collectives), "calls")


def sum_collective_ms(run: LoadedRun) -> Quantity | None:
    """The sum of the durations of all collectives of a rank in ms per step, as the mean over ranks that were profiled by steps.

    None if no rank was profiled by steps.
    """
    return average_ms_per_step(run.breakdowns, lambda breakdown: sum(tally.total_ns for tally in breakdown.collectives))


def compute_mean_collective_ms(run: LoadedRun) -> Quantity | None:
    """The mean duration of a collective, in ms; None if no collective was called."""
    ms_per_step, calls_per_step = sum_collective_ms(run), count_collectives(run)
    if not (ms_per_step and calls_per_step and calls_per_step.value):
        return None
    return Quantity(ms_per_step.value / calls_per_step.value, "ms", ms_per_step.kind)


def _build_share_metric(name: str, part_name: str, direction: Direction, condition: str) -> Metric:
    """Make a metric: a part of the profiled time in percent of this time, as the mean over the profiled ranks.

    part_name: the name of this part in `Breakdown`. The value is None if no rank has a profiled time, or if the part is only
    a bound.
    """
    return Metric(
        name=name,
        unit="%",
        direction=direction,
        definition=f"Share of the profiled time in which {condition}, as defined by the metric in ms. Mean over the "
        "profiled ranks.",
        of_run=lambda run: average_over_ranks(run.breakdowns, lambda breakdown: _compute_share(breakdown, part_name), "%"),
        reads=Reads(breakdown=WORK_KINDS),
    )


def _compute_share(breakdown: Breakdown, part_name: str) -> float | None:
    """A part of the profiled time of a rank in percent of this time; None if the part is not known or only a bound."""
    part_ns = breakdown.get_exact_ns(part_name)
    return 100 * part_ns / breakdown.span_ns if breakdown.span_ns and part_ns is not None else None


_COLLECTIVE_READS = Reads(breakdown=("collectives", "profiler steps"))
METRICS = (
    _build_share_metric("compute_pct", "compute_ns", "higher is better", "a kernel computes"),
    _build_share_metric("communication_pct", "communication_ns", "lower is better", "a collective runs"),
    _build_share_metric("non_compute_pct", "non_compute_ns", "lower is better", "something runs but nothing computes"),
    _build_share_metric("idle_pct", "idle_ns", "lower is better", "nothing runs"),
    Metric(
        name="collective_count",
        unit="calls",
        direction="neither",
        definition="Number of collectives in a profiled step: their kernels or gloo spans. Mean over the profiled ranks.",
        of_run=count_collectives,
        reads=_COLLECTIVE_READS,
    ),
    Metric(
        name="collective_ms",
        unit="ms",
        direction="lower is better",
        definition="Sum of the durations of the collectives in a profiled step, including the wait for other ranks. "
        "Each of several collectives at the same time counts fully. Mean over the profiled ranks.",
        of_run=sum_collective_ms,
        reads=_COLLECTIVE_READS,
    ),
    Metric(
        name="collective_mean_ms",
        unit="ms",
        direction="lower is better",
        definition="Mean duration of a collective in the profiled steps, including the wait for other ranks.",
        of_run=compute_mean_collective_ms,
        reads=_COLLECTIVE_READS,
    ),
)
