"""Computes from a trace how a rank spent its time: with compute, communication, memory operations, or idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo, intervals
from collect.traces.communication import kernel_communication
from collect.traces.intervals import Intervals
from collect.traces.launches import GPU_CATEGORIES, STEP, Launches, launches
from collect.traces.trace import Trace

Source = Literal["gpu", "gloo", "cpu"]
# The categories that Kineto uses for hosts and GPUs (libkineto/src/ActivityType.cpp). Other accelerators have other categories.
KNOWN_CATEGORIES = frozenset(
    {*GPU_CATEGORIES, "cpu_op", "user_annotation", "gpu_user_annotation", "cpu_instant_event", "python_function", "overhead"}
    | {"cuda_runtime", "cuda_driver", "cuda_sync", "cuda_event", "external_correlation", "ac2g", "fwdbwd", "Trace"}
)
_LOW = (1 << 32) - 1


class EventTally(msgspec.Struct, frozen=True):
    """All events with one name: their number, and the sum of their durations."""

    name: str  # name of the kernel, operator or collective
    count: int  # number of calls
    total_ns: int  # sum of the durations of these calls

    @property
    def mean_ns(self) -> float:
        """The mean duration of an event with this name, in ns."""
        return self.total_ns / self.count


class LeftOut(msgspec.Struct, frozen=True):
    """Events of a GPU that are left out of all figures.

    total_ns: the sum of their durations. share_pct: this sum in percent of the sum over all events of the GPU.
    """

    count: int  # number of events
    total_ns: int
    share_pct: float


class HtaBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The least and the greatest value that HolisticTraceAnalysis may give for each figure of one rank.

    HolisticTraceAnalysis (HTA) uses an unstable sort, so the order of kernels that start in the same microsecond depends on the
    processor (see collect/traces/hta.py). Times are in ns. overlap_pct: before HTA rounds it to two decimals; None if there is
    no communication.
    """

    span_ns: tuple[int, int]  # least and greatest value
    compute_ns: tuple[int, int]  # least and greatest value
    non_compute_ns: tuple[int, int]  # least and greatest value
    idle_ns: tuple[int, int]  # least and greatest value
    overlap_pct: tuple[float, float] | None


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank spent its time, in ns. Overlapping intervals, such as of kernels on several streams, count once.

    source: `gpu` if the figures come from kernels (categories kernel, gpu_memcpy, gpu_memset) of all devices of the rank;
    `gloo` if they come from operators of the main thread and collectives of gloo; `cpu` if they come from operators alone.
    steps: the number of profiler steps that the figures cover.
    memory_ns: memory operations; None if not known, as with the sources `gloo` and `cpu`, whose traces do not show them.
    non_compute_ns: the time in which something runs but nothing computes. overlap_ns: compute and a collective run together.
    before_recording, outside_steps: events that are left out of the figures: events that were launched before the recording
    began, and, in a trace with profiler steps, events that were launched outside of these steps (collect/traces/launches.py).
    None: no events are left out.
    hta_bounds: None for exact figures. Otherwise the figures are rounded and cut as in HolisticTraceAnalysis, and the figures
    that HolisticTraceAnalysis itself prints may differ from them within these bounds.
    """

    rank: int | None
    source: Source
    steps: int
    span_ns: int  # from the first start to the last end: of kernels (gpu), else of profiler steps if any, else of operators
    compute_ns: int  # time in which something computes
    communication_ns: int  # time in which a collective runs
    memory_ns: int | None
    non_compute_ns: int
    idle_ns: int  # time in which nothing runs
    overlap_ns: int
    collectives: list[EventTally]  # one entry for each name of a collective, such as all_reduce
    kernels: list[EventTally]  # one entry per name, the longest total first; with gloo and cpu: operators of the main thread
    before_recording: LeftOut | None = None
    outside_steps: LeftOut | None = None
    hta_bounds: HtaBounds | None = None

    @property
    def like_hta(self) -> bool:
        """Whether the figures (numbers) are rounded and cut as in HolisticTraceAnalysis."""
        return self.hta_bounds is not None

    @property
    def kind(self) -> str:
        """The kind of the figures (numbers): `gpu`, `gpu, like HTA` or `cpu`. Figures of different kinds cannot be compared."""
        return ("gpu, like HTA" if self.like_hta else "gpu") if self.source == "gpu" else "cpu"

    @property
    def exposed_communication_ns(self) -> int:
        """The time in which collectives run and nothing computes, in ns."""
        return self.communication_ns - self.overlap_ns

    @property
    def overlap_pct(self) -> float | None:
        """The share of the communication during which something computes, in percent; None if there is no communication."""
        return 100 * self.overlap_ns / self.communication_ns if self.communication_ns > 0 else None


def breakdown(trace: Trace) -> Breakdown | None:
    """Compute the exact breakdown of the time of a rank, to the nanosecond, from its trace.

    None if the trace contains neither kernels nor operators, or if it contains no kernels of a GPU, but events of an
    accelerator with unknown categories.
    """
    gpu = launches(trace)
    if not (gpu.counted | gpu.before_recording).any():
        return None if unknown_categories(trace) else _on_cpu(trace)
    kernel = gpu.counted & trace.of_category("kernel")
    memory = gpu.counted & ~kernel
    communicating = kernel_communication(trace, kernel)
    collective = communicating.rows
    compute, communicated, moved = (intervals.of(trace, rows) for rows in (kernel & ~collective, collective, memory))
    busy = intervals.of(trace, kernel | memory)
    rows = np.flatnonzero(collective)
    exact = _breakdown_of(
        trace,
        "gpu",
        int(busy.end[-1] - busy.start[0]) if len(busy.end) else 0,
        compute,
        communicated,
        moved,
        collectives=_collectives(trace, rows, communicating.names(rows)),
        kernels=tally(trace, kernel | memory),
    )
    return msgspec.structs.replace(
        exact,
        before_recording=_left_out(trace, gpu, gpu.before_recording),
        outside_steps=_left_out(trace, gpu, gpu.outside_steps),
    )


def _left_out(trace: Trace, gpu: Launches, rows: NDArray[np.bool_]) -> LeftOut | None:
    if not rows.any():
        return None
    total, left = (_sum(trace.duration_ns[chosen]) for chosen in (gpu.counted | gpu.before_recording | gpu.outside_steps, rows))
    return LeftOut(int(np.count_nonzero(rows)), left, 100 * left / total if total else 0.0)


def unknown_categories(trace: Trace) -> dict[str, int]:
    """The categories in a trace that Kineto uses neither for hosts nor for GPUs, with the number of their events."""
    categories, counts = np.unique(trace.category, return_counts=True)
    named = {trace.labels[category]: int(count) for category, count in zip(categories, counts, strict=True)}
    return {name: count for name, count in named.items() if name not in KNOWN_CATEGORIES}


def _on_cpu(trace: Trace) -> Breakdown | None:
    found = gloo.activity(trace)
    if found is None:
        return None
    source: Source = "gloo" if found.collectives.any() else "cpu"
    spans = np.flatnonzero(found.collectives)
    return _breakdown_of(
        trace,
        source,
        found.end_ns - found.start_ns,
        found.compute,
        found.communication,
        None,
        collectives=_collectives(trace, spans, gloo.meanings(trace, found)),
        kernels=tally(trace, found.operators),
    )


def _collectives(trace: Trace, rows: NDArray[np.intp], names: Sequence[str]) -> list[EventTally]:
    """Count the calls of each collective, and add up their durations.

    rows: the indexes of the calls in the trace. names: the name of the collective of each call.
    """
    return renamed([EventTally(name, 1, int(trace.duration_ns[row])) for name, row in zip(names, rows, strict=True)], str)


def _breakdown_of(
    trace: Trace,
    source: Source,
    span_ns: int,
    compute: Intervals,
    communication: Intervals,
    memory: Intervals | None,
    *,
    collectives: list[EventTally],
    kernels: list[EventTally],
) -> Breakdown:
    busy = intervals.either(compute, communication)
    if memory is not None:
        busy = intervals.either(busy, memory)
    return Breakdown(
        rank=trace.rank,
        source=source,
        steps=steps(trace),
        span_ns=span_ns,
        compute_ns=compute.length,
        communication_ns=communication.length,
        memory_ns=None if memory is None else memory.length,
        non_compute_ns=busy.length - compute.length,
        idle_ns=span_ns - busy.length,
        overlap_ns=intervals.both(compute, communication),
        collectives=collectives,
        kernels=kernels,
    )


def steps(trace: Trace) -> int:
    """The number of profiler steps in a trace."""
    return sum(STEP.match(label) is not None for label in trace.labels)


def tally(
    trace: Trace, rows: NDArray[np.bool_] | NDArray[np.intp], duration_ns: NDArray[np.int64] | None = None
) -> list[EventTally]:
    """Count the chosen events by name, and add up their durations. The name with the longest total comes first.

    rows: the chosen events, as a boolean mask or as indexes. duration_ns: durations, one per chosen event, that replace the
    durations in the trace.
    """
    lasted = trace.duration_ns[rows] if duration_ns is None else duration_ns
    labels, group = np.unique(trace.name[rows], return_inverse=True)
    counts = np.bincount(group, minlength=len(labels))
    low, high = np.zeros((2, len(labels)), np.int64)  # sums of the lower and the upper 32 bits: one sum may exceed 64 bits
    np.add.at(low, group, lasted & _LOW)
    np.add.at(high, group, lasted >> 32)
    totals = [(int(above) << 32) + int(below) for above, below in zip(high, low, strict=True)]
    found = [EventTally(trace.labels[label], int(n), ns) for label, n, ns in zip(labels, counts, totals, strict=True)]
    return sorted(found, key=lambda one: (-one.total_ns, one.name))


def _sum(durations_ns: NDArray[np.int64]) -> int:
    return (int(np.sum(durations_ns >> 32)) << 32) + int(np.sum(durations_ns & _LOW))


def renamed(tallies: Sequence[EventTally], rename: Callable[[str], str]) -> list[EventTally]:
    """Rename tallies, and add up tallies that then have the same name. The result is sorted by total time, the longest
    first."""
    totals: dict[str, EventTally] = {}
    for one in tallies:
        name = rename(one.name)
        before = totals.get(name, EventTally(name, 0, 0))
        totals[name] = EventTally(name, before.count + one.count, before.total_ns + one.total_ns)
    return sorted(totals.values(), key=lambda one: (-one.total_ns, one.name))
