"""Metrics of collectives, and of the parts of the profiled time in percent.

Percentages of ranks can be compared even if the ranks have different speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Direction, Metric

if TYPE_CHECKING:
    from collect.traces.breakdown import Breakdown


def make_share_function(ns: Callable[[Breakdown], int | None]) -> Callable[[LoadedRun], Quantity | None]:
    """Make the function of a metric: a part of the profiled time in percent of this time, as the mean over the profiled ranks.

    ns: a function that returns this part for one rank, in ns. The value is None if no rank has both this part and a profiled
    time.
    """

    def of_run(run: LoadedRun) -> Quantity | None:
        shares = [
            (100 * time / rank.span_ns, rank) for rank in run.breakdowns if rank.span_ns and (time := ns(rank)) is not None
        ]
        return Quantity(sum(pct for pct, _ in shares) / len(shares), "%", shares[0][1].kind) if shares else None

    return of_run


def collective_count(run: LoadedRun) -> Quantity | None:
    """The number of collectives per step, as the mean over the ranks that were profiled by steps; None if there is no such
    rank."""
    profiled = [breakdown for breakdown in run.breakdowns if breakdown.steps]
    if not profiled:
        return None
    counts = [sum(tally.count for tally in breakdown.collectives) / breakdown.steps for breakdown in profiled]
    return Quantity(sum(counts) / len(counts), "calls", profiled[0].kind)


def collective_ms(run: LoadedRun) -> Quantity | None:
    """The sum of the durations of all collectives of a rank in ms per step, as the mean over ranks that were profiled by steps.

    None if no rank was profiled by steps.
    """
    profiled = [breakdown for breakdown in run.breakdowns if breakdown.steps]
    if not profiled:
        return None
    times = [sum(tally.total_ns for tally in breakdown.collectives) / breakdown.steps / 1e6 for breakdown in profiled]
    return Quantity(sum(times) / len(times), "ms", profiled[0].kind)


def collective_mean_ms(run: LoadedRun) -> Quantity | None:
    """The mean duration of a collective, in ms; None if no collective was called."""
    time, count = collective_ms(run), collective_count(run)
    return Quantity(time.value / count.value, "ms", time.kind) if time and count and count.value else None


def _share_metric(name: str, ns: Callable[[Breakdown], int | None], direction: Direction, condition: str) -> Metric:
    text = f"Share of the profiled time in which {condition}, as defined by the metric in ms. Mean over the profiled ranks."
    return Metric(name=name, unit="%", direction=direction, definition=text, of_run=make_share_function(ns))


METRICS = (
    _share_metric("compute_pct", lambda rank: rank.compute_ns, "higher is better", "a kernel computes"),
    _share_metric("communication_pct", lambda rank: rank.communication_ns, "lower is better", "a collective runs"),
    _share_metric(
        "non_compute_pct", lambda rank: rank.non_compute_ns, "lower is better", "something runs but nothing computes"
    ),
    _share_metric("idle_pct", lambda rank: rank.idle_ns, "lower is better", "nothing runs"),
    Metric(
        name="collective_count",
        unit="calls",
        direction="neither",
        definition="Number of collectives in a profiled step: their kernels or gloo spans. Mean over the profiled ranks.",
        of_run=collective_count,
    ),
    Metric(
        name="collective_ms",
        unit="ms",
        direction="lower is better",
        definition="Sum of the durations of the collectives in a profiled step, including the wait for other ranks. Each of "
        "several collectives at the same time counts fully. Mean over the profiled ranks.",
        of_run=collective_ms,
    ),
    Metric(
        name="collective_mean_ms",
        unit="ms",
        direction="lower is better",
        definition="Mean duration of a collective in the profiled steps, including the wait for other ranks.",
        of_run=collective_mean_ms,
    ),
)
