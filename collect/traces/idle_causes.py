"""Why nothing ran on a rank: the host launched nothing, communication was waited for, or another cause; and launch delays.

Each moment of idle time has exactly one cause, so that the causes sum to the idle time to the nanosecond.

On a GPU, a kernel or memory operation is *queued* from the start of the call that launches it until it starts.

- communication: the moment lies in a gap that a collective's end began and that ends with work on another stream, which was
  already queued: the streams hand over. Or nothing is queued and a collective runs on the host (gloo).
- host: nothing is queued otherwise. The host launched too late: it computed in Python, waited for data, or waited for the GPU.
- other: something is queued and does not start: the time that a launch takes, a dependency on a copy or on another stream.

HolisticTraceAnalysis (get_idle_time_breakdown) judges each stream by itself and gives a gap as a whole to one cause: `host
wait` if the next kernel's launch began after the gap did, `kernel wait` if the gap is shorter than 30 ns, else `other`. A rank
with idle time on one stream may be busy on another one, so here a moment counts only if nothing runs at all, and a gap is cut
at the moment of the launch.

On a CPU with gloo, idle time is inside the steps when the main thread computes nothing and no collective runs.

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
    """The idle time of a rank in ns by cause; the three sum to its idle time."""

    host_ns: int
    communication_ns: int
    other_ns: int

    @property
    def total_ns(self) -> int:
        """All idle time in ns."""
        return self.host_ns + self.communication_ns + self.other_ns


class LaunchDelays(msgspec.Struct, frozen=True):
    """Time from the end of the call that launches a kernel or memory operation to the start of the operation, in ns.

    0 where the operation starts before the call returns. count: operations whose launch is recorded; the total and the median
    are of these. HolisticTraceAnalysis (get_cuda_kernel_launch_stats) defines it in the same way.
    """

    count: int
    total_ns: int
    median_ns: int
    longest_ns: int


def causes(trace: Trace, active: Activities) -> IdleCauses | None:
    """The idle time by cause; None if a GPU's trace holds no calls that launch kernels, so that the causes are not known."""
    idle = intervals.complement(active.busy, active.start_ns, active.end_ns)
    if active.source != "gpu":
        return _on_host(idle, active)
    if not (active.launch_row >= 0).any():
        return None
    begin = trace.start_ns[active.rows]
    # A launch that is not recorded lies before the recording: its kernel was queued from the start.
    launched = np.where(active.launch_row >= 0, trace.start_ns[active.launch_row], active.start_ns)
    queued = intervals.union(launched, begin)
    unqueued = intervals.without(idle, queued)
    waiting = intervals.common(unqueued, active.host_collectives).length
    handed_over = _handed_over(trace, active, intervals.common(idle, queued))
    host = unqueued.length - waiting
    return IdleCauses(host, waiting + handed_over, idle.length - host - waiting - handed_over)


def launch_delays(trace: Trace, active: Activities) -> LaunchDelays | None:
    """The launch delays of a GPU's work; None if no launch is recorded."""
    known = active.launch_row >= 0
    if active.source != "gpu" or not known.any():
        return None
    delay = np.maximum(trace.start_ns[active.rows[known]] - trace.end_ns[active.launch_row[known]], 0)
    return LaunchDelays(len(delay), int(delay.sum()), int(np.sort(delay)[(len(delay) - 1) // 2]), int(delay.max()))


def _on_host(idle: Intervals, active: Activities) -> IdleCauses:
    communication = intervals.common(idle, active.host_collectives).length
    operating = intervals.either(active.operating, active.host_collectives)
    other = intervals.common(idle, operating).length - communication
    return IdleCauses(idle.length - communication - other, communication, other)


def _handed_over(trace: Trace, active: Activities, queued_idle: Intervals) -> int:
    """The idle time in ns, while something is queued, between the end of a collective and the next work on another stream."""
    begin, end = trace.start_ns[active.rows], trace.end_ns[active.rows]
    stream = trace.stream[active.rows]
    lasting = end > begin  # what has no length neither begins nor ends a gap
    collective = lasting & active.is_collective
    busy = active.busy
    # A gap lies between two busy intervals. Something must have been queued when it began, at the end of a collective.
    place = np.searchsorted(busy.start, queued_idle.start, side="right")
    between = (place > 0) & (place < len(busy.start))
    place, idle = place[between], Intervals(queued_idle.start[between], queued_idle.end[between])
    behind = np.isin(idle.start, end[collective])  # a collective ends where a gap begins, never within it
    place, idle = place[behind], Intervals(idle.start[behind], idle.end[behind])
    ends = _streams_at(end, stream, collective & np.isin(end, idle.start))
    begins = _streams_at(begin, stream, lasting & np.isin(begin, busy.start[place]))
    total = 0
    for first, last, following in zip(idle.start.tolist(), idle.end.tolist(), busy.start[place].tolist(), strict=True):
        if any(one != other for one in ends[first] for other in begins[following]):
            total += last - first
    return total


def _streams_at(moments: NDArray[np.int64], stream: NDArray[np.int64], rows: NDArray[np.bool_]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for moment, number in zip(moments[rows].tolist(), stream[rows].tolist(), strict=True):
        found.setdefault(moment, set()).add(number)
    return found
