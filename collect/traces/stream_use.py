"""Finds what limits the queue of a GPU: how long launching calls last, how much each stream works, and what runs together."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import intervals
from collect.traces.activities import Activities
from collect.traces.calls import find_steps_at
from collect.traces.trace import Trace

_KINDS = ("compute", "communication", "memory")


class LaunchCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of the host that launched the work of a GPU, and the call during which the GPU was idle longest (the longest
    call if the GPU was never idle during calls). Times are in ns."""

    count: int
    total_ns: int
    median_ns: int
    longest_ns: int
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

    stream: int
    count: int
    """The number of kernels and memory operations."""
    busy_ns: int
    """The time in which the stream works."""
    idle_ns: int
    """The time from the first to the last work of the rank in which the stream does not work."""
    longest_queue: int | None
    """The most operations that were launched and had not started; None: no launch is recorded."""
    mean_queue: float | None
    """The mean number of these operations over the whole time."""


class RunningTogether(msgspec.Struct, frozen=True):
    """The time in which exactly these kinds of work run. The sum over all kinds is the time in which something runs."""

    kinds: str
    """The kinds, such as `compute + communication`."""
    total_ns: int


def measure_launch_calls(trace: Trace, activities: Activities) -> LaunchCalls | None:
    """The calls that launched the work of a rank; None if none is recorded."""
    call_rows, first_events = np.unique(activities.launch_row, return_index=True)
    call_rows, first_events = call_rows[call_rows >= 0], first_events[call_rows >= 0]
    if not len(call_rows):
        return None
    durations_ns = trace.duration_ns[call_rows]
    idle_time = intervals.complement(activities.busy, activities.start_ns, activities.end_ns)
    idle_until_end, idle_until_start = (
        intervals.length_before(idle_time, edge_ns[call_rows]) for edge_ns in (trace.end_ns, trace.start_ns)
    )
    idle_ns = idle_until_end - idle_until_start
    chosen = int(np.lexsort((durations_ns, idle_ns))[-1])
    row = call_rows[chosen]
    (step,) = find_steps_at(trace, trace.start_ns[row : row + 1])
    return LaunchCalls(
        count=len(call_rows),
        total_ns=int(durations_ns.sum()),
        median_ns=int(np.sort(durations_ns)[(len(durations_ns) - 1) // 2]),
        longest_ns=int(durations_ns.max()),
        call=trace.labels[trace.name[row]],
        call_ns=int(durations_ns[chosen]),
        idle_ns=int(idle_ns[chosen]),
        launched=trace.labels[trace.name[activities.event_rows[first_events[chosen]]]],
        step=None if step < 0 else step,
    )


def measure_streams(trace: Trace, activities: Activities) -> list[StreamUse]:
    """The streams of a GPU that work, the busiest first; empty on a CPU."""
    if activities.source != "gpu":
        return []
    streams = trace.stream[activities.event_rows]
    uses = [_measure_stream(trace, activities, streams == stream, int(stream)) for stream in np.unique(streams)]
    return sorted(uses, key=lambda use: -use.busy_ns)


def _measure_stream(trace: Trace, activities: Activities, is_chosen: NDArray[np.bool_], stream: int) -> StreamUse:
    event_rows, launch_rows = activities.event_rows[is_chosen], activities.launch_row[is_chosen]
    busy_ns, span_ns = intervals.event_spans(trace, event_rows).length, activities.end_ns - activities.start_ns
    launched = launch_rows >= 0
    queued_ns = trace.end_ns[launch_rows[launched]]
    started_ns = np.maximum(trace.start_ns[event_rows[launched]], queued_ns)
    # the queue is longest when an operation is queued: so many are queued by then, and so many have started
    lengths = np.arange(1, len(queued_ns) + 1) - np.searchsorted(np.sort(started_ns), np.sort(queued_ns), side="right")
    return StreamUse(
        stream=stream,
        count=len(event_rows),
        busy_ns=busy_ns,
        idle_ns=span_ns - busy_ns,
        longest_queue=max(0, int(lengths.max())) if launched.any() else None,
        mean_queue=float((started_ns - queued_ns).sum() / span_ns) if launched.any() and span_ns else None,
    )


def measure_together(activities: Activities) -> list[RunningTogether]:
    """How long each combination of kinds of work runs, the longest first."""
    sets = (activities.compute, activities.communication, activities.memory)
    edges = np.unique(np.concatenate([edge for entry in sets for edge in entry]))
    code = sum(intervals.covers(entry, edges[:-1]).astype(np.intp) << index for index, entry in enumerate(sets))
    total_ns = np.zeros(1 << len(_KINDS), np.int64)
    np.add.at(total_ns, code, np.diff(edges))
    return [
        RunningTogether(
            " + ".join(kind for index, kind in enumerate(_KINDS) if combination >> index & 1), int(total_ns[combination])
        )
        for combination in np.argsort(-total_ns, kind="stable").tolist()
        if combination and total_ns[combination]
    ]
