"""Finds what limits the queue of a GPU: how long launching calls last, how much each stream works, and what runs together."""

from __future__ import annotations

import msgspec
import numpy as np

from collect.traces import intervals
from collect.traces.activities import Activities
from collect.traces.gloo import find_steps_at
from collect.traces.trace import Trace

_WORK_KINDS = ("compute", "communication", "memory")


class LaunchCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of the host that launched the work of a GPU, and the call during which the GPU was idle longest (the longest
    call if the GPU was never idle during calls). Times are in ns."""

    rank: int | None
    """The rank; None: the trace does not say it."""
    count: int
    """The number of calls."""
    total_ns: int
    """The sum of their durations."""
    median_ns: int
    """The median of their durations."""
    longest_ns: int
    """The longest duration."""
    call: str
    """The name of this call, such as cudaLaunchKernel."""
    call_ns: int
    """Its duration."""
    idle_ns: int
    """How long the GPU was idle during the call."""
    launched: str
    """The kernel or memory operation that the call launched."""
    step: int | None
    """The number of the profiler step in which the call began; None: it began in no step."""


class StreamUse(msgspec.Struct, frozen=True, kw_only=True):
    """The work on one stream of a GPU."""

    rank: int | None
    """The rank; None: the trace does not say it."""
    stream: int
    """The number of the stream."""
    count: int
    """The number of kernels and memory operations."""
    busy_ns: int
    """The time in which the stream works."""
    idle_ns: int
    """The time from the first to the last work of the rank in which the stream does not work."""
    mean_queue: float | None
    """The mean number of operations that are launched and have not started; None: no launch is recorded."""
    longest_queue: int | None
    """The most such operations at a moment."""


class RunningTogether(msgspec.Struct, frozen=True):
    """The time in which exactly these kinds of work run. The sum over all kinds is the time in which something runs."""

    kinds: str
    """The kinds, such as `compute + communication`."""
    total_ns: int
    """The time."""


def measure_launch_calls(trace: Trace, activities: Activities) -> list[LaunchCalls]:
    """The calls that launched the work of a rank; empty if none is recorded."""
    call_rows, first_events = np.unique(activities.launch_row, return_index=True)
    call_rows, first_events = call_rows[call_rows >= 0], first_events[call_rows >= 0]
    if not len(call_rows):
        return []
    durations_ns = trace.duration_ns[call_rows]
    idle_time = intervals.complement_intervals(activities.busy, activities.start_ns, activities.end_ns)
    idle_ns_before_end, idle_ns_before_start = (
        intervals.measure_length_before(idle_time, edge_ns[call_rows]) for edge_ns in (trace.end_ns, trace.start_ns)
    )
    longest_idle_index = int(np.lexsort((durations_ns, idle_ns_before_end - idle_ns_before_start))[-1])
    (step_number,) = find_steps_at(trace, trace.start_ns[call_rows[[longest_idle_index]]])
    launch_calls = LaunchCalls(
        rank=trace.rank,
        count=len(call_rows),
        total_ns=int(durations_ns.sum()),
        median_ns=int(np.sort(durations_ns)[(len(durations_ns) - 1) // 2]),
        longest_ns=int(durations_ns.max()),
        call=trace.labels[trace.name[call_rows[longest_idle_index]]],
        call_ns=int(durations_ns[longest_idle_index]),
        idle_ns=int(idle_ns_before_end[longest_idle_index] - idle_ns_before_start[longest_idle_index]),
        launched=trace.labels[trace.name[activities.event_rows[first_events[longest_idle_index]]]],
        step=None if step_number < 0 else step_number,
    )
    return [launch_calls]


def measure_streams(trace: Trace, activities: Activities) -> list[StreamUse]:
    """The streams of a GPU that work, the busiest first; empty on a CPU."""
    if activities.source != "gpu":
        return []
    streams, profiled_ns = trace.stream[activities.event_rows], activities.end_ns - activities.start_ns
    stream_uses = []
    for stream in np.unique(streams).tolist():
        event_rows, launch_rows = (activities.event_rows[streams == stream], activities.launch_row[streams == stream])
        busy_ns, has_launch = intervals.merge_events(trace, event_rows).length, launch_rows >= 0
        queued_ns = trace.end_ns[launch_rows[has_launch]]
        started_ns = np.maximum(trace.start_ns[event_rows[has_launch]], queued_ns)
        # the queue is longest when an operation joins it: then it holds all that joined and have not started
        lengths = np.arange(1, len(queued_ns) + 1) - np.searchsorted(np.sort(started_ns), np.sort(queued_ns), side="right")
        stream_use = StreamUse(
            rank=trace.rank,
            stream=stream,
            count=len(event_rows),
            busy_ns=busy_ns,
            idle_ns=profiled_ns - busy_ns,
            mean_queue=float((started_ns - queued_ns).sum() / profiled_ns) if len(lengths) and profiled_ns else None,
            longest_queue=max(0, int(lengths.max())) if len(lengths) else None,
        )
        stream_uses.append(stream_use)
    return sorted(stream_uses, key=lambda stream_use: -stream_use.busy_ns)


def measure_together(activities: Activities) -> list[RunningTogether]:
    """How long each combination of kinds of work runs, the longest first."""
    times_by_kind = (activities.compute, activities.communication, activities.memory)
    edges_ns = np.unique(np.concatenate([edge_times for kind_times in times_by_kind for edge_times in kind_times]))
    kinds_codes = np.zeros(max(0, len(edges_ns) - 1), np.intp)
    for index, kind_times in enumerate(times_by_kind):
        kinds_codes += intervals.find_covered(kind_times, edges_ns[:-1]) * (1 << index)
    total_ns = np.zeros(1 << len(_WORK_KINDS), np.int64)
    np.add.at(total_ns, kinds_codes, np.diff(edges_ns))
    names = [" + ".join(kind for index, kind in enumerate(_WORK_KINDS) if code >> index & 1) for code in range(len(total_ns))]
    together_times = [RunningTogether(name, ns) for name, ns in zip(names, total_ns.tolist(), strict=True) if name and ns]
    return sorted(together_times, key=lambda use: -use.total_ns)
