"""Metrics of collectives, and of the parts of the profiled time in percent.

Percentages of ranks can be compared even if the ranks have different speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import WORK_KINDS, Direction, Metric, Reads
from collect.metric_values import mean_ms_per_step, mean_over_ranks, mean_per_step

if TYPE_CHECKING:
    from collect.traces.breakdown import Breakdown


def collective_count(run: LoadedRun) -> Quantity | None:
    """The number of collectives per step, as the mean over the ranks that were profiled by steps; None if there is no such
    rank."""
    return mean_per_step(run.breakdowns, lambda rank: sum(tally.count for tally in rank.collectives), "calls")


def collective_ms(run: LoadedRun) -> Quantity | None:
    """The sum of the durations of all collectives of a rank in ms per step, as the mean over ranks that were profiled by steps.

    None if no rank was profiled by steps.
    """
    return mean_ms_per_step(run.breakdowns, lambda rank: sum(tally.total_ns for tally in rank.collectives))


def collective_mean_ms(run: LoadedRun) -> Quantity | None:
    """The mean duration of a collective, in ms; None if no collective was called."""
    ms_per_step, calls_per_step = collective_ms(run), collective_count(run)
    if not (ms_per_step and calls_per_step and calls_per_step.value):
        return None
    return Quantity(ms_per_step.value / calls_per_step.value, "ms", ms_per_step.kind)


def _share_metric(name: str, name_of_time: str, direction: Direction, condition: str) -> Metric:
    """Make a metric: a part of the profiled time in percent of this time, as the mean over the profiled ranks.

    name_of_time: the name of this part in `Breakdown`. The value is None if no rank has a profiled time, or if the part is only
    a bound.
    """
    return Metric(
        name=name,
        unit="%",
        direction=direction,
        definition=f"Share of the profiled time in which {condition}, as defined by the metric in ms. Mean over the profiled "
        "ranks.",
        of_run=lambda run: mean_over_ranks(run.breakdowns, lambda rank: _compute_share(rank, name_of_time), "%"),
        reads=Reads(breakdown=WORK_KINDS),
    )


def _compute_share(rank: Breakdown, name: str) -> float | None:
    """A part of the profiled time of a rank in percent of this time; None if the part is not known or only a bound."""
    part_ns = rank.exact_ns(name)
    return 100 * part_ns / rank.span_ns if rank.span_ns and part_ns is not None else None


_COLLECTIVES = Reads(breakdown=("collectives", "profiler steps"))
METRICS = (
    _share_metric("compute_pct", "compute_ns", "higher is better", "a kernel computes"),
    _share_metric("communication_pct", "communication_ns", "lower is better", "a collective runs"),
    _share_metric("non_compute_pct", "non_compute_ns", "lower is better", "something runs but nothing computes"),
    _share_metric("idle_pct", "idle_ns", "lower is better", "nothing runs"),
    Metric(
        name="collective_count",
        unit="calls",
        direction="neither",
        definition="Number of collectives in a profiled step: their kernels or gloo spans. Mean over the profiled ranks.",
        of_run=collective_count,
        reads=_COLLECTIVES,
    ),
    Metric(
        name="collective_ms",
        unit="ms",
        direction="lower is better",
        definition="Sum of the durations of the collectives in a profiled step, including the wait for other ranks. Each of "
        "several collectives at the same time counts fully. Mean over the profiled ranks.",
        of_run=collective_ms,
        reads=_COLLECTIVES,
    ),
    Metric(
        name="collective_mean_ms",
        unit="ms",
        direction="lower is better",
        definition="Mean duration of a collective in the profiled steps, including the wait for other ranks.",
        of_run=collective_mean_ms,
        reads=_COLLECTIVES,
    ),
)
