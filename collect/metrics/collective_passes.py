"""Metrics of the calls of one kind of collective in a pass: forward and backward of one micro-batch.

A step with several micro-batches has several passes. Studies count the collectives of one pass that reduces gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Direction, Metric
from collect.metric_values import NS_PER_MS, average_per_step
from collect.metrics.trace_collectives import EXAMPLE_COLLECTIVE, OF_COLLECTIVE_MEANING
from shardlab.matrix.gradient_sync import EVERY_PASS, LAST_PASS

if TYPE_CHECKING:
    from collect.traces.breakdown import Breakdown, EventTally


def count_calls(run: LoadedRun, collective: str) -> Quantity | None:
    """The number of calls of a collective in a pass that reduces gradients."""
    return _measure_per_pass(run, collective, lambda tally: tally.count, "calls")


def sum_durations(run: LoadedRun, collective: str) -> Quantity | None:
    """The sum of the durations of these calls, in ms."""
    return _measure_per_pass(run, collective, lambda tally: tally.total_ns / NS_PER_MS, "ms")


def compute_mean_duration(run: LoadedRun, collective: str) -> Quantity | None:
    """The mean duration of one call, in ms."""
    total_time, call_count = sum_durations(run, collective), count_calls(run, collective)
    return Quantity(total_time.value / call_count.value, "ms", total_time.kind) if total_time and call_count else None


def _measure_per_pass(run: LoadedRun, collective: str, measure: Callable[[EventTally], float], unit: str) -> Quantity | None:
    """The sum of `measure` over the calls of a collective in the profiled steps, divided by the passes that reduce gradients,
    as the mean over the ranks that were profiled by steps.

    None if no rank called the collective, or if it is not known which passes reduce gradients.
    """
    if run.run is None or run.result is None:
        return None
    sync_mode = str(run.result.knobs.get("effective", {}).get("sync"))
    passes_per_step = {LAST_PASS: 1, EVERY_PASS: run.run.cell.gradient_accumulation_steps}.get(sync_mode)

    def measure_rank(breakdown: Breakdown) -> float:
        return sum(measure(tally) for tally in breakdown.collectives if tally.name == collective)

    if passes_per_step is None or not any(map(measure_rank, run.breakdowns)):
        return None
    return average_per_step(run.breakdowns, measure_rank, unit, passes_per_step)


def _build_collective_metric(
    name: str, unit: str, direction: Direction, definition: str, of_run_at: Callable[[LoadedRun, str], Quantity | None]
) -> Metric:
    return Metric(
        name=name,
        unit=unit,
        direction=direction,
        definition=f"{definition} Mean over the profiled ranks. {OF_COLLECTIVE_MEANING}",
        of_run_at=of_run_at,
        argument="of",
        example=EXAMPLE_COLLECTIVE,
    )


_PER_PASS = (
    "in a pass (forward and backward of a micro-batch) that reduces gradients: in the profiled steps, divided "
    "by these passes, of which `sync: last_pass` has 1 in a step."
)
METRICS = (
    _build_collective_metric("collective_pass_count", "calls", "neither", f"Calls of a collective {_PER_PASS}", count_calls),
    _build_collective_metric(
        "collective_pass_ms",
        "ms",
        "lower is better",
        f"Sum of the durations of a collective's calls {_PER_PASS}",
        sum_durations,
    ),
    _build_collective_metric(
        "collective_call_ms",
        "ms",
        "lower is better",
        "Mean duration of a collective's calls in the profiled steps, including the wait for other ranks.",
        compute_mean_duration,
    ),
)
