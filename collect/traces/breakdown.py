"""Computes from a trace how a rank spent its time: with compute, communication, memory operations, or idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo, intervals
from collect.traces.communication import find_communication
from collect.traces.intervals import Intervals
from collect.traces.lacks import BOUNDS_BY_LACK, BoundKind, Lack, find_lacks, find_launch_calls, list_devices
from collect.traces.launches import GPU_CATEGORIES, STEP_NAME, GpuEventsByLaunch, divide_by_launch
from collect.traces.trace import Trace

Source = Literal["gpu", "gloo", "cpu"]
# The categories that Kineto uses for hosts and GPUs (libkineto/src/ActivityType.cpp). Other accelerators have other categories.
KNOWN_CATEGORIES = frozenset(
    {*GPU_CATEGORIES, "cpu_op", "user_annotation", "gpu_user_annotation", "cpu_instant_event", "python_function", "overhead"}
    | {"cuda_runtime", "cuda_driver", "cuda_sync", "cuda_event", "external_correlation", "ac2g", "fwdbwd", "Trace"}
)
_LOW_32_BITS = (1 << 32) - 1


class EventTally(msgspec.Struct, frozen=True):
    """All events with one name: their number, and the sum of their durations."""

    name: str
    """Name of the kernel, operator or collective."""
    count: int
    """Number of calls."""
    total_ns: int
    """Sum of the durations of these calls."""

    @property
    def mean_ns(self) -> float:
        """The mean duration of an event with this name, in ns."""
        return self.total_ns / self.count


class LeftOut(msgspec.Struct, frozen=True):
    """Events of a GPU that are left out of all figures."""

    count: int
    """Number of events."""
    total_ns: int
    """The sum of their durations."""
    share_pct: float
    """This sum in percent of the sum over all events of the GPU."""


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """How one of several GPUs of a rank spent the time of the rank, in ns, as in `Breakdown`."""

    device: int
    """The number of the GPU."""
    compute_ns: int
    """Time in which something computes."""
    communication_ns: int
    """Time in which a collective runs."""
    memory_ns: int
    """Time of memory operations."""
    idle_ns: int
    """Time in which nothing runs on this GPU."""


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank spent its time, in ns. Overlapping intervals, such as of kernels on several streams, count once."""

    rank: int | None
    source: Source
    """`gpu` if the figures come from kernels (categories kernel, gpu_memcpy, gpu_memset) of all devices of the rank; `gloo` if
    they come from operators of the main thread and collectives of gloo; `cpu` if they come from operators alone."""
    steps: int
    """The number of profiler steps that the figures cover."""
    span_ns: int
    """From the first start to the last end: of kernels (gpu), else of profiler steps if any, else of operators."""
    compute_ns: int
    """Time in which something computes."""
    communication_ns: int
    """Time in which a collective runs."""
    memory_ns: int | None
    """Memory operations; None if not known, as with the sources `gloo` and `cpu`, whose traces do not show them."""
    non_compute_ns: int
    """The time in which something runs but nothing computes."""
    idle_ns: int
    """Time in which nothing runs."""
    overlap_ns: int
    """Compute and a collective run together."""
    collectives: list[EventTally]
    """One entry for each name of a collective, such as all_reduce."""
    kernels: list[EventTally]
    """One entry per name, the longest total first; with gloo and cpu: operators of the main thread."""
    before_recording: LeftOut | None = None
    """Events that were launched before the recording began, which are left out of the figures; None: no such events."""
    outside_steps: LeftOut | None = None
    """In a trace with profiler steps: events that were launched outside of these steps (collect/traces/launches.py), which are
    left out of the figures; None: no such events."""
    devices: list[DeviceTime] = []
    """The time of each GPU, if kernels ran on several."""
    file: str = ""
    """The name of the trace file in the folder of the traces."""
    lacks: list[Lack] = []
    """What the recording lacks."""
    like_hta: bool = False
    """Whether the figures are rounded and cut as in HolisticTraceAnalysis."""

    @property
    def kind(self) -> str:
        """The kind of the figures (numbers): `gpu`, `gpu, like HTA` or `cpu`. Figures of different kinds cannot be compared."""
        return ("gpu, like HTA" if self.like_hta else "gpu") if self.source == "gpu" else "cpu"

    @property
    def bounds(self) -> dict[str, BoundKind]:
        """The names of the times that are only bounds, because the recording lacks something."""
        return {field_name: bound for lack in self.lacks for field_name, bound in BOUNDS_BY_LACK[lack.kind].items()}

    def get_exact_ns(self, field_name: str) -> int | None:
        """The time with this name; None if it is not known, or is only a bound."""
        return None if field_name in self.bounds else getattr(self, field_name)

    @property
    def exposed_communication_ns(self) -> int:
        """The time in which collectives run and nothing computes, in ns."""
        return self.communication_ns - self.overlap_ns

    @property
    def idle_pct(self) -> float | None:
        """The share of the time in which nothing runs, in percent; None if no time was profiled."""
        return 100 * self.idle_ns / self.span_ns if self.span_ns else None

    @property
    def overlap_pct(self) -> float | None:
        """The share of the communication during which something computes, in percent; None if there is no communication."""
        return 100 * self.overlap_ns / self.communication_ns if self.communication_ns > 0 else None


def compute_breakdown(trace: Trace) -> Breakdown | None:
    """Compute the exact breakdown of the time of a rank, to the nanosecond, from its trace.

    None if the trace contains neither kernels nor operators, or if it contains no kernels of a GPU, but events of an
    accelerator with unknown categories.
    """
    gpu_events = divide_by_launch(trace)
    if not (gpu_events.is_counted | gpu_events.before_recording).any():
        return _compute_cpu_breakdown(trace) if is_trace_of_cpu(trace) else None
    is_kernel = gpu_events.is_counted & trace.has_category("kernel")
    is_memory = gpu_events.is_counted & ~is_kernel
    communication_kernels = find_communication(trace, is_kernel)
    is_collective = communication_kernels.is_communication
    compute, communication, memory_operations = (
        intervals.merge_events(trace, event_mask) for event_mask in (is_kernel & ~is_collective, is_collective, is_memory)
    )
    busy = intervals.merge_events(trace, is_kernel | is_memory)
    event_mask = np.flatnonzero(is_collective)
    exact_breakdown = _build_breakdown(
        trace,
        "gpu",
        int(busy.end[-1] - busy.start[0]) if len(busy.end) else 0,
        compute,
        communication,
        memory_operations,
        collectives=_tally_collectives(trace, event_mask, communication_kernels.name_collectives(event_mask)),
        kernels=tally_events(trace, is_kernel | is_memory),
    )
    return msgspec.structs.replace(
        exact_breakdown,
        before_recording=_measure_left_out(trace, gpu_events, gpu_events.before_recording),
        outside_steps=_measure_left_out(trace, gpu_events, gpu_events.outside_steps),
        devices=_measure_devices(trace, is_kernel, is_memory, is_collective),
        lacks=find_lacks(trace, gpu_events.is_counted),
    )


def _measure_devices(
    trace: Trace, is_kernel: NDArray[np.bool_], is_memory: NDArray[np.bool_], is_collective: NDArray[np.bool_]
) -> list[DeviceTime]:
    """The time of each GPU; empty if all kernels ran on one."""
    devices = list_devices(trace, is_kernel)
    rank_busy = intervals.merge_events(trace, is_kernel | is_memory)
    device_times = []
    for device in devices if len(devices) > 1 else ():
        is_on_device = trace.device == device
        compute, communication, memory_ns, busy_ns = (
            intervals.merge_events(trace, is_on_device & event_mask).length
            for event_mask in (is_kernel & ~is_collective, is_collective, is_memory, is_kernel | is_memory)
        )
        idle_ns = int(rank_busy.end[-1] - rank_busy.start[0]) - busy_ns
        device_times.append(
            DeviceTime(device=device, compute_ns=compute, communication_ns=communication, memory_ns=memory_ns, idle_ns=idle_ns)
        )
    return device_times


def is_trace_of_cpu(trace: Trace) -> bool:
    """Whether a trace without events of a GPU is of a program on the CPU: it has no events of another accelerator, and no call
    put work on a GPU."""
    return not count_unknown_categories(trace) and not len(find_launch_calls(trace).rows)


def _measure_left_out(trace: Trace, gpu_events: GpuEventsByLaunch, is_left_out: NDArray[np.bool_]) -> LeftOut | None:
    if not is_left_out.any():
        return None
    is_gpu_event = gpu_events.is_counted | gpu_events.before_recording | gpu_events.outside_steps
    total_ns, left_out_ns = (_sum_durations(trace.duration_ns[event_mask]) for event_mask in (is_gpu_event, is_left_out))
    return LeftOut(int(np.count_nonzero(is_left_out)), left_out_ns, 100 * left_out_ns / total_ns if total_ns else 0.0)


def count_unknown_categories(trace: Trace) -> dict[str, int]:
    """The categories in a trace that Kineto uses neither for hosts nor for GPUs, with the number of their events."""
    categories, event_counts = np.unique(trace.category, return_counts=True)
    count_by_category = {trace.labels[label]: int(count) for label, count in zip(categories, event_counts, strict=True)}
    return {category_name: count for category_name, count in count_by_category.items() if category_name not in KNOWN_CATEGORIES}


def _compute_cpu_breakdown(trace: Trace) -> Breakdown | None:
    cpu_activity = gloo.find_activity(trace)
    if cpu_activity is None:
        return None
    figures_source: Source = "gloo" if cpu_activity.is_collective.any() else "cpu"
    span_rows = np.flatnonzero(cpu_activity.is_collective)
    cpu_breakdown = _build_breakdown(
        trace,
        figures_source,
        cpu_activity.end_ns - cpu_activity.start_ns,
        cpu_activity.compute,
        cpu_activity.communication,
        None,
        collectives=_tally_collectives(trace, span_rows, gloo.name_collectives(trace, cpu_activity)),
        kernels=tally_events(trace, cpu_activity.is_operator),
    )
    return msgspec.structs.replace(cpu_breakdown, lacks=find_lacks(trace, np.zeros(len(trace.name), np.bool_)))


def _tally_collectives(trace: Trace, call_rows: NDArray[np.intp], collective_names: Sequence[str]) -> list[EventTally]:
    """Count the calls of each collective, and add up their durations.

    call_rows: the indexes of the calls in the trace. collective_names: the name of the collective of each call.
    """
    return rename_tallies(
        [EventTally(name, 1, int(trace.duration_ns[row])) for name, row in zip(collective_names, call_rows, strict=True)], str
    )


def _build_breakdown(
    trace: Trace,
    figures_source: Source,
    span_ns: int,
    compute: Intervals,
    communication: Intervals,
    memory: Intervals | None,
    *,
    collectives: list[EventTally],
    kernels: list[EventTally],
) -> Breakdown:
    busy = intervals.unite_intervals(compute, communication)
    if memory is not None:
        busy = intervals.unite_intervals(busy, memory)
    return Breakdown(
        rank=trace.rank,
        source=figures_source,
        steps=count_steps(trace),
        span_ns=span_ns,
        compute_ns=compute.length,
        communication_ns=communication.length,
        memory_ns=None if memory is None else memory.length,
        non_compute_ns=busy.length - compute.length,
        idle_ns=span_ns - busy.length,
        overlap_ns=intervals.measure_intersection(compute, communication),
        collectives=collectives,
        kernels=kernels,
    )


def count_steps(trace: Trace) -> int:
    """The number of profiler steps in a trace."""
    return sum(STEP_NAME.match(label) is not None for label in trace.labels)


def tally_events(
    trace: Trace, chosen_events: NDArray[np.bool_] | NDArray[np.intp], replaced_durations_ns: NDArray[np.int64] | None = None
) -> list[EventTally]:
    """Count the chosen events by name, and add up their durations. The name with the longest total comes first.

    chosen_events: the chosen events, as a boolean mask or as indexes. replaced_durations_ns: durations, one per chosen event,
    that replace the durations in the trace."""
    durations_ns = trace.duration_ns[chosen_events] if replaced_durations_ns is None else replaced_durations_ns
    name_labels, name_index_by_event = np.unique(trace.name[chosen_events], return_inverse=True)
    event_counts = np.bincount(name_index_by_event, minlength=len(name_labels))
    # sums of the lower and the upper 32 bits: one sum may exceed 64 bits
    low_bits_sums, high_bits_sums = np.zeros((2, len(name_labels)), np.int64)
    np.add.at(low_bits_sums, name_index_by_event, durations_ns & _LOW_32_BITS)
    np.add.at(high_bits_sums, name_index_by_event, durations_ns >> 32)
    totals_ns = [(int(high_sum) << 32) + int(low_sum) for high_sum, low_sum in zip(high_bits_sums, low_bits_sums, strict=True)]
    tallies = [
        EventTally(trace.labels[name_label], int(count), total_ns)
        for name_label, count, total_ns in zip(name_labels, event_counts, totals_ns, strict=True)
    ]
    return sorted(tallies, key=lambda event_tally: (-event_tally.total_ns, event_tally.name))


def _sum_durations(durations_ns: NDArray[np.int64]) -> int:
    return (int(np.sum(durations_ns >> 32)) << 32) + int(np.sum(durations_ns & _LOW_32_BITS))


def rename_tallies(tallies: Sequence[EventTally], get_new_name: Callable[[str], str]) -> list[EventTally]:
    """Rename tallies, and add up tallies that then have the same name. The result is sorted by total time, the longest
    first."""
    tally_by_name: dict[str, EventTally] = {}
    for event_tally in tallies:
        name = get_new_name(event_tally.name)
        sum_so_far = tally_by_name.get(name, EventTally(name, 0, 0))
        tally_by_name[name] = EventTally(name, sum_so_far.count + event_tally.count, sum_so_far.total_ns + event_tally.total_ns)
    return sorted(tally_by_name.values(), key=lambda tally: (-tally.total_ns, tally.name))
