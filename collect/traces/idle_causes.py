"""Finds the causes of idle time on a rank (the host, communication, or another cause), and the delays of launches.

Each moment of idle time has exactly one cause, so the sum over the causes is the idle time, to the nanosecond.

On a GPU, a kernel or memory operation is *queued* from the end of the call that launches it until the operation starts.

- communication: the moment is in a gap that begins when a collective ends, and that ends with work on another stream that was
  already queued: the GPU switches from the stream of the collective to the other stream. Or no work is queued, the host is in
  no launching call, and a collective runs on the host (gloo).
- launching: no work is queued, and the host is inside a call whose work has not started. A call may last long: the first launch
  of a kernel loads its code, and a full queue or a lock blocks the host.
- host: the same outside such calls, while no collective runs on the host. The host launched too late: it ran Python code,
  waited for data, or waited for the GPU.
- other: work is queued but does not start: the GPU needs time to start it, or the work depends on a copy or on another stream.

HolisticTraceAnalysis (get_idle_time_breakdown) looks at each stream separately and assigns a whole gap to one cause: `host
wait` if the launch of the next kernel began after the start of the gap, `kernel wait` if the gap is shorter than 30 ns, else
`other`.
A rank may be idle on one stream and busy on another stream. So in this module a moment counts as idle only if nothing runs on
any stream, and a gap is divided at the start and at the end of the launch.

On a CPU with gloo, the rank is idle when, inside a step, the main thread computes nothing and no collective runs.

- communication: the main thread is in an operator of c10d, which starts collectives or waits for them.
- other: the main thread is in another operator, such as autograd's wrapper, whose hooks wait.
- host: the main thread is in no operator: Python, and reading data.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import intervals
from collect.traces.activities import Activities
from collect.traces.intervals import Intervals
from collect.traces.trace import Trace


class IdleCauses(msgspec.Struct, frozen=True):
    """The idle time of a rank by cause, in ns; the sum of the four is the idle time of the rank."""

    host_ns: int
    """The host had not begun to launch the next work."""
    launching_ns: int
    """The host is inside the call that launches the next work; 0 on a CPU, which launches none."""
    communication_ns: int
    """The next work waits for a collective."""
    other_ns: int
    """The rank is idle for another reason."""

    @property
    def total_ns(self) -> int:
        """The whole idle time in ns."""
        return self.host_ns + self.launching_ns + self.communication_ns + self.other_ns


class LaunchDelays(msgspec.Struct, frozen=True):
    """The times from the end of a call that launches a kernel or memory operation to the start of this operation, in ns.

    The delay is 0 if the operation starts before the call returns.
    """

    count: int
    """The number of operations whose launch is recorded; total, median and longest are over these operations.
    HolisticTraceAnalysis (get_cuda_kernel_launch_stats) uses the same definition."""
    total_ns: int
    """Sum of the delays."""
    median_ns: int
    """Median of the delays."""
    longest_ns: int
    """The longest delay."""


def find_idle_causes(trace: Trace, activities: Activities) -> IdleCauses | None:
    """Divide the idle time of a rank by cause. None if the trace of a GPU does not record the calls that launch kernels."""
    idle_time = intervals.complement_intervals(activities.busy, activities.start_ns, activities.end_ns)
    if activities.source != "gpu":
        return _find_cpu_idle_causes(idle_time, activities)
    if not (activities.launch_row >= 0).any():
        return None
    work_starts_ns = trace.start_ns[activities.event_rows]
    # If the launch of a kernel is not recorded, the launch was before the recording began. So the kernel counts as queued from
    # the start of the recording on.
    has_launch = activities.launch_row >= 0
    call_starts_ns, call_ends_ns = (
        np.where(has_launch, edge_ns[activities.launch_row], activities.start_ns) for edge_ns in (trace.start_ns, trace.end_ns)
    )
    queued_time = intervals.merge_overlapping(call_ends_ns, work_starts_ns)
    unqueued_idle = intervals.subtract_intervals(idle_time, queued_time)
    unlaunched_idle = intervals.subtract_intervals(unqueued_idle, intervals.merge_overlapping(call_starts_ns, work_starts_ns))
    host_communication_ns = intervals.intersect_intervals(unlaunched_idle, activities.host_collectives).length
    handover_ns = _measure_handover(trace, activities, intervals.intersect_intervals(idle_time, queued_time))
    host_ns, launching_ns = unlaunched_idle.length - host_communication_ns, unqueued_idle.length - unlaunched_idle.length
    other_ns = idle_time.length - unqueued_idle.length - handover_ns
    return IdleCauses(host_ns, launching_ns, host_communication_ns + handover_ns, other_ns)


def compute_launch_delays(trace: Trace, activities: Activities) -> LaunchDelays | None:
    """The delays between launch and start of the kernels and memory operations of a GPU; None if the trace records no
    launch."""
    launch_known = activities.launch_row >= 0
    if activities.source != "gpu" or not launch_known.any():
        return None
    delays_ns = np.maximum(
        trace.start_ns[activities.event_rows[launch_known]] - trace.end_ns[activities.launch_row[launch_known]], 0
    )
    return LaunchDelays(
        len(delays_ns), int(delays_ns.sum()), int(np.sort(delays_ns)[(len(delays_ns) - 1) // 2]), int(delays_ns.max())
    )


def _find_cpu_idle_causes(idle_time: Intervals, activities: Activities) -> IdleCauses:
    communication_ns = intervals.intersect_intervals(idle_time, activities.host_collectives).length
    operating_time = intervals.unite_intervals(activities.operating, activities.host_collectives)
    other_ns = intervals.intersect_intervals(idle_time, operating_time).length - communication_ns
    return IdleCauses(idle_time.length - communication_ns - other_ns, 0, communication_ns, other_ns)


def _measure_handover(trace: Trace, activities: Activities, queued_idle: Intervals) -> int:
    """The idle time between the end of a collective and the next work on another stream, while this work is queued, in ns.

    queued_idle: the idle time during which work is queued.
    """
    begin_ns, work_ends_ns = trace.start_ns[activities.event_rows], trace.end_ns[activities.event_rows]
    stream = trace.stream[activities.event_rows]
    is_lasting = work_ends_ns > begin_ns  # an event with duration 0 neither begins nor ends a gap
    is_collective = is_lasting & activities.is_collective
    busy_time = activities.busy
    # A gap is the time between two busy intervals. A gap counts only if it begins at the end of a collective while work is
    # queued.
    next_busy = np.searchsorted(busy_time.start, queued_idle.start, side="right")
    is_gap = (next_busy > 0) & (next_busy < len(busy_time.start))
    next_busy, gap_time = next_busy[is_gap], Intervals(queued_idle.start[is_gap], queued_idle.end[is_gap])
    # nothing runs in a gap, so a collective can only end where the gap starts
    is_after = np.isin(gap_time.start, work_ends_ns[is_collective])
    next_busy, gap_time = (next_busy[is_after], Intervals(gap_time.start[is_after], gap_time.end[is_after]))
    ended_streams_by_ns = _group_streams_by_time(work_ends_ns, stream, is_collective & np.isin(work_ends_ns, gap_time.start))
    started_streams_by_ns = _group_streams_by_time(begin_ns, stream, is_lasting & np.isin(begin_ns, busy_time.start[next_busy]))
    handover_ns = 0
    for idle_start_ns, idle_end_ns, busy_start_ns in zip(
        gap_time.start.tolist(), gap_time.end.tolist(), busy_time.start[next_busy].tolist(), strict=True
    ):
        if any(
            ended_stream != started_stream
            for ended_stream in ended_streams_by_ns[idle_start_ns]
            for started_stream in started_streams_by_ns[busy_start_ns]
        ):
            handover_ns += idle_end_ns - idle_start_ns
    return handover_ns


def _group_streams_by_time(
    times_ns: NDArray[np.int64], stream_by_event: NDArray[np.int64], is_chosen: NDArray[np.bool_]
) -> dict[int, set[int]]:
    streams_by_ns: dict[int, set[int]] = {}
    for moment_ns, stream_number in zip(times_ns[is_chosen].tolist(), stream_by_event[is_chosen].tolist(), strict=True):
        streams_by_ns.setdefault(moment_ns, set()).add(stream_number)
    return streams_by_ns
