"""Metrics of the parts of a profiled step, such as compute and idle time: exact values from traces, as means over ranks.

The definitions follow HolisticTraceAnalysis (its documentation: Temporal Breakdown, Communication Computation Overlap), with
two exceptions: times are not rounded to whole microseconds, and the last profiled step is not left out. `collect trace
--like-hta` prints the numbers of HolisticTraceAnalysis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from collect.metric import WORK_KINDS, Direction, EventKind, Metric, Reads
from collect.metric_values import average_ms_per_step, average_over_ranks

if TYPE_CHECKING:
    from collect.traces.breakdown import Breakdown

PROFILER_STEPS: tuple[EventKind, ...] = ("profiler steps",)


def _build_time_metric(
    name: str,
    get_time_ns: Callable[[Breakdown], int | None],
    event_kinds: tuple[EventKind, ...],
    direction: Direction,
    definition: str,
) -> Metric:
    """Make a metric whose value is a time in ms per profiled step, or None if no rank was profiled by steps.

    get_time_ns: a function that returns this time of one rank in ns, summed over all profiled steps of the rank. event_kinds:
    from which the time is computed."""
    return Metric(
        name=name,
        unit="ms",
        direction=direction,
        definition=definition,
        of_run=lambda run: average_ms_per_step(run.breakdowns, get_time_ns),
        reads=Reads(breakdown=(*event_kinds, *PROFILER_STEPS)),
    )


METRICS = (
    _build_time_metric(
        "compute_ms",
        lambda breakdown: breakdown.compute_ns,
        ("compute",),
        "lower is better",
        "Time of a profiled step in which a kernel computes: the union of all kernels but those of collectives. With "
        "gloo: the union of the main thread's operators, without those of c10d and without autograd's wrappers around "
        "operators.",
    ),
    _build_time_metric(
        "communication_ms",
        lambda breakdown: breakdown.communication_ns,
        ("collectives",),
        "lower is better",
        "Time of a profiled step in which a collective runs, including the wait for other ranks: the union of the "
        "kernels of collectives, or of gloo's spans.",
    ),
    _build_time_metric(
        "exposed_communication_ms",
        lambda breakdown: breakdown.exposed_communication_ns,
        ("compute", "collectives"),
        "lower is better",
        "Time of a profiled step in which a collective runs and nothing computes: communication minus its overlap "
        "with compute.",
    ),
    _build_time_metric(
        "memory_operations_ms",
        lambda breakdown: breakdown.get_exact_ns("memory_ns"),
        ("memory operations",),
        "lower is better",
        "Time of a profiled step in which a GPU copies or sets memory: the union of gpu_memcpy and gpu_memset.",
    ),
    _build_time_metric(
        "non_compute_ms",
        lambda breakdown: breakdown.get_exact_ns("non_compute_ns"),
        WORK_KINDS,
        "lower is better",
        "Time of a profiled step in which something runs but nothing computes: exposed communication and exposed "
        "memory operations together.",
    ),
    _build_time_metric(
        "idle_ms",
        lambda breakdown: breakdown.get_exact_ns("idle_ns"),
        WORK_KINDS,
        "lower is better",
        "Time of a profiled step in which nothing runs, between the first and the last kernel (with gloo: within the steps).",
    ),
    _build_time_metric(
        "kernel_ms",
        lambda breakdown: breakdown.span_ns,
        WORK_KINDS,
        "lower is better",
        "Time of a profiled step from the first kernel to the last, including idle time (with gloo: of the step): "
        "compute, non-compute and idle time together, which HolisticTraceAnalysis and study 2 print as kernel time.",
    ),
    Metric(
        name="overlap_pct",
        unit="%",
        direction="higher is better",
        definition="Share of the communication of the profiled steps during which something computes as well.",
        of_run=lambda run: average_over_ranks(run.breakdowns, lambda breakdown: breakdown.overlap_pct, "%"),
        reads=Reads(breakdown=("compute", "collectives")),
    ),
)
