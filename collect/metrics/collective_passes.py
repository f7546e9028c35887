"""Metrics of the calls of one kind of collective in a pass: forward and backward of one micro-batch.

A step with several micro-batches has several passes. Studies count the collectives of one pass that reduces gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Direction, Metric
from collect.metric_values import NS_PER_MS, mean_per_step
from collect.metrics.trace_collectives import EXAMPLE, OF_MEANING
from shardlab.matrix.gradient_sync import EVERY_PASS, LAST_PASS

if TYPE_CHECKING:
    from collect.traces.breakdown import Breakdown, EventTally


def count_calls(run: LoadedRun, collective: str) -> Quantity | None:
    """The number of calls of a collective in a pass that reduces gradients."""
    return _measure_pass(run, collective, lambda tally: tally.count, "calls")


def sum_durations(run: LoadedRun, collective: str) -> Quantity | None:
    """The sum of the durations of these calls, in ms."""
    return _measure_pass(run, collective, lambda tally: tally.total_ns / NS_PER_MS, "ms")


def mean_duration(run: LoadedRun, collective: str) -> Quantity | None:
    """The mean duration of one call, in ms."""
    time, count = sum_durations(run, collective), count_calls(run, collective)
    return Quantity(time.value / count.value, "ms", time.kind) if time and count else None


def _measure_pass(run: LoadedRun, collective: str, measure: Callable[[EventTally], float], unit: str) -> Quantity | None:
    """The sum of `measure` over the calls of a collective in the profiled steps, divided by the passes that reduce gradients,
    as the mean over the ranks that were profiled by steps.

    None if no rank called the collective, or if it is not known which passes reduce gradients.
    """
    if run.run is None or run.result is None:
        return None
    sync = str(run.result.knobs.get("effective", {}).get("sync"))
    passes = {LAST_PASS: 1, EVERY_PASS: run.run.cell.gradient_accumulation_steps}.get(sync)

    def measure_rank(rank: Breakdown) -> float:
        return sum(measure(tally) for tally in rank.collectives if tally.name == collective)

    if passes is None or not any(map(measure_rank, run.breakdowns)):
        return None
    return mean_per_step(run.breakdowns, measure_rank, unit, passes)


def _build_metric(
    name: str, unit: str, direction: Direction, definition: str, of_run_at: Callable[[LoadedRun, str], Quantity | None]
) -> Metric:
    return Metric(
        name=name,
        unit=unit,
        direction=direction,
        definition=f"{definition} Mean over the profiled ranks. {OF_MEANING}",
        of_run_at=of_run_at,
        argument="of",
        example=EXAMPLE,
    )


_PASS = (
    "in a pass (forward and backward of a micro-batch) that reduces gradients: in the profiled steps, divided by these passes, "
    "of which `sync: last_pass` has 1 in a step."
)
METRICS = (
    _build_metric("collective_pass_count", "calls", "neither", f"Calls of a collective {_PASS}", count_calls),
    _build_metric(
        "collective_pass_ms", "ms", "lower is better", f"Sum of the durations of a collective's calls {_PASS}", sum_durations
    ),
    _build_metric(
        "collective_call_ms",
        "ms",
        "lower is better",
        "Mean duration of a collective's calls in the profiled steps, including the wait for other ranks.",
        mean_duration,
    ),
)
