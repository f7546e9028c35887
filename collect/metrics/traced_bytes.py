"""Metrics of the bytes that ranks send in a step, from the message sizes in profiler records, and their difference from
theory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.metric_values import read_result_value

if TYPE_CHECKING:
    from collect.traces.rank_analysis import RankAnalysis

TOLERANCE_PCT = 3.0  # up to this difference in percent, the report says that traces and theory agree


def sum_traced_bytes(run: LoadedRun) -> Quantity | None:
    """The bytes that all ranks together send in a step, from their traces.

    None unless every rank has a trace that contains the size of each collective.
    """
    if run.run is None:
        return None
    analyses = run.traces.analyses
    if sorted(analysis.rank for analysis in analyses if analysis.rank is not None) != list(range(run.run.world.world_size)):
        return None
    step_bytes = sum_bytes_sent_in_step(analyses)
    return None if step_bytes is None else Quantity(step_bytes, "bytes")


def sum_bytes_sent_in_step(analyses: Sequence[RankAnalysis]) -> float | None:
    """The bytes that these ranks together send in one profiler step. For each rank, the mean over its steps is used.

    None if a rank was not profiled by steps, or if the bytes of any call are not known.
    """
    if not analyses or not all(analysis.steps for analysis in analyses):
        return None
    total_bytes = 0.0
    for analysis in analyses:
        for call in analysis.calls:
            if call.step < 0:
                continue
            if call.sent_bytes is None:
                return None
            total_bytes += call.sent_bytes / analysis.steps
    return total_bytes


def compute_traced_difference(run: LoadedRun) -> Quantity | None:
    """The bytes according to the traces minus the bytes in theory, in percent of the bytes in theory.

    None for strategies that do other work by design, because the number of bytes differs from step to step.
    """
    if run.result is None or (run.result.same_work is not None and run.result.same_work.verdict == "other work"):
        return None
    theory_bytes = read_result_value(run, "communication_bytes.theory")
    if not theory_bytes or (measured_bytes := sum_traced_bytes(run)) is None:
        return None
    return Quantity(100 * (measured_bytes.value / theory_bytes - 1), "%")


METRICS = (
    Metric(
        name="sent_traced_bytes",
        column=MetricColumn("sent", 15, "Per step, traced"),
        unit="bytes",
        direction="lower is better",
        definition="Bytes sent in one step by all ranks together, from the sizes of the collectives in profiler records, mean "
        "over the profiled steps. Each collective counts as the ring algorithm that sends the fewest bytes. Blank unless all "
        "ranks were profiled and the records have the size of every collective: on GPUs always, for gloo with `profile: "
        "{shapes: true}`.",
        of_run=sum_traced_bytes,
        reads=Reads(run=("world.world_size",), trace=("collectives", "profiler steps")),
    ),
    Metric(
        name="traced_difference_pct",
        column=MetricColumn("sent", 55, "Traces against theory"),
        unit="%",
        direction="neither",
        definition="`sent_traced_bytes` against `sent_theory_bytes`. Within 3 %, sizes and theory agree. In very small models "
        "scalars such as losses and norms count, which the theory leaves out. Blank if either is blank, and for strategies "
        "that do other work by design, because their steps differ in their communication.",
        of_run=compute_traced_difference,
        reads=Reads(
            run=("world.world_size",),
            result=("communication_bytes.theory", "same_work.verdict"),
            trace=("collectives", "profiler steps"),
        ),
    ),
)
