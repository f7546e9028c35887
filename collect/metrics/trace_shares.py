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


def share(ns: Callable[[Breakdown], int | None]) -> Callable[[LoadedRun], Quantity | None]:
    """Make the function of a metric: a part of the profiled time in percent of this time, as the mean over the profiled ranks.

    ns: a function that returns this part for one rank, in ns. The value is None if no rank has both this part and a profiled
    time.
    """

    def of_run(run: LoadedRun) -> Quantity | None:
        known = [(100 * time / one.span_ns, one) for one in run.breakdowns if one.span_ns and (time := ns(one)) is not None]
        return Quantity(sum(pct for pct, _ in known) / len(known), "%", known[0][1].kind) if known else None

    return of_run


def collective_count(run: LoadedRun) -> Quantity | None:
    """The number of collectives per step, as the mean over the ranks that were profiled by steps; None if there is no such
    rank."""
    known = [one for one in run.breakdowns if one.steps]
    if not known:
        return None
    counts = [sum(tally.count for tally in one.collectives) / one.steps for one in known]
    return Quantity(sum(counts) / len(counts), "calls", known[0].kind)


def collective_ms(run: LoadedRun) -> Quantity | None:
    """The sum of the durations of all collectives of a rank in ms per step, as the mean over ranks that were profiled by steps.

    None if no rank was profiled by steps.
    """
    known = [one for one in run.breakdowns if one.steps]
    if not known:
        return None
    times = [sum(tally.total_ns for tally in one.collectives) / one.steps / 1e6 for one in known]
    return Quantity(sum(times) / len(times), "ms", known[0].kind)


def collective_mean_ms(run: LoadedRun) -> Quantity | None:
    """The mean duration of a collective, in ms; None if no collective was called."""
    time, count = collective_ms(run), collective_count(run)
    return Quantity(time.value / count.value, "ms", time.kind) if time and count and count.value else None


def _share(name: str, ns: Callable[[Breakdown], int | None], direction: Direction, what: str) -> Metric:
    definition = f"Share of the profiled time in which {what}, as defined by the metric in ms. Mean over the profiled ranks."
    return Metric(name=name, unit="%", direction=direction, definition=definition, of_run=share(ns))


METRICS = (
    _share("compute_pct", lambda one: one.compute_ns, "higher is better", "a kernel computes"),
    _share("communication_pct", lambda one: one.communication_ns, "lower is better", "a collective runs"),
    _share("non_compute_pct", lambda one: one.non_compute_ns, "lower is better", "something runs but nothing computes"),
    _share("idle_pct", lambda one: one.idle_ns, "lower is better", "nothing runs"),
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
