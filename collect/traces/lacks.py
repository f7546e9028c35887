"""Finds what a recording of a GPU lacks, and which figures (numbers) are therefore only bounds.

- Launches without work: a call that puts work on the GPU, and no event of the GPU with its correlation.
- Durations that cannot be: work that still runs when the next work of its stream starts, although a stream runs its work in
  order.
- Several GPUs in one row, whose idle time hides in the union of their work.
- No event of a GPU, although the process group uses a library of GPUs, or the head of the trace names a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo, intervals
from collect.traces.intervals import Intervals
from collect.traces.launches import GPU_CATEGORIES, LAUNCH_CATEGORIES
from collect.traces.trace import Trace

LackKind = Literal["launches", "copies", "overlaps", "devices", "no gpu events"]
Bound = Literal["at least", "at most", "unknown"]
# The calls that put work on a GPU. A host function that is put into a stream is no work of the GPU.
_LAUNCH_CALL = re.compile(r"(?:cuda|cu|hip)(?:\w*Launch(?!HostFunc)\w*|Memcpy\w*|Memset\w*)\Z")
_MEMORY_CALL = re.compile(r"Memcpy|Memset")
# A call that copies or sets 0 bytes puts nothing on the GPU, and returns within half a microsecond; other calls take at least
# 3 us (traces of H100, PyTorch 2.6).
_SHORTEST_MEMORY_CALL_NS = 1000
# With programmatic dependent launch, a kernel may start up to 4 us before the end of the previous kernel (traces of B200).
_LONGEST_OVERLAP_NS = 10_000
_GPU_LIBRARIES = ("nccl", "rccl")
WITHOUT_WORK = (
    "no figures, because the work of the GPU was not recorded. Usual reasons: the user may not read the GPU's counters "
    "(NVreg_RestrictProfilingToAdminUsers), or another profiler was attached."
)
_MOST_STEPS = 8  # the most steps that a sentence names

_ALL_AT_LEAST: dict[str, Bound] = dict.fromkeys(
    ("span_ns", "compute_ns", "communication_ns", "memory_ns", "overlap_ns"), "at least"
)
_UNKNOWN: dict[str, Bound] = dict.fromkeys(("non_compute_ns", "exposed_communication_ns"), "unknown")
BOUNDS: dict[LackKind, dict[str, Bound]] = {
    "launches": {**_ALL_AT_LEAST, **_UNKNOWN, "idle_ns": "at most"},
    "copies": {"memory_ns": "at least", "non_compute_ns": "at least", "idle_ns": "at most"},
    "overlaps": {**dict.fromkeys(_ALL_AT_LEAST, "at most"), **_UNKNOWN, "idle_ns": "at least"},
    "devices": {"idle_ns": "at least"},
    "no gpu events": {},
}
SPOILING: frozenset[LackKind] = frozenset({"launches", "overlaps", "no gpu events"})  # no figure of the trace ranks a cell


class Lack(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of thing that the recording of a rank lacks."""

    kind: LackKind
    """Which kind."""
    count: int
    """How many: launches or copies without an event, kernels and copies that overlap the next one, or GPUs."""
    total: int
    """Of how many launches, copies, kernels and copies, or GPUs."""
    text: str
    """A sentence that says it."""
    by_step: dict[int, int] = {}
    """For launches and copies in profiler steps: the number of the step -> how many."""
    by_stream: dict[int, int] = {}
    """For launches and copies: the stream, -1 if the trace does not say it -> how many."""


class MatchedLaunches(NamedTuple):
    """The calls of a trace that put work on a GPU; the masks have the shape (number of calls,)."""

    rows: NDArray[np.intp]
    """The indexes of the calls in the trace."""
    is_memory: NDArray[np.bool_]
    """Which calls copy or set memory."""
    has_work: NDArray[np.bool_]
    """Which calls need no event of their own: an event of the GPU has their correlation, or they only recorded a graph."""


def find_launch_calls(trace: Trace) -> MatchedLaunches:
    """Find the calls of the host that put work on a GPU, and which of them have an event of the GPU."""
    is_launch = [_LAUNCH_CALL.match(label) is not None for label in trace.labels]
    rows = np.flatnonzero(trace.has_category(*LAUNCH_CATEGORIES) & trace.match_labels(trace.name, is_launch))
    rows = rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows], trace.thread[rows]))]
    thread, category, end_ns = trace.thread[rows], trace.category[rows], trace.end_ns[rows]
    has_event = np.isin(trace.correlation[rows], trace.correlation[trace.has_category(*GPU_CATEGORIES)])
    has_event |= trace.correlation[rows] <= 0  # it is not known which event belongs to the call
    # A call of the driver inside a call of the runtime is the same launch; the event has the correlation of one of the two.
    is_inner = np.zeros(len(rows), np.bool_)
    is_inner[1:] = (thread[1:] == thread[:-1]) & (category[1:] != category[:-1]) & (end_ns[1:] <= end_ns[:-1])
    outer = np.maximum.accumulate(np.where(is_inner, 0, np.arange(len(rows))))
    has_event = np.bincount(outer, has_event, len(rows))[outer] > 0 if len(rows) else has_event
    is_memory = trace.match_labels(trace.name[rows], [_MEMORY_CALL.search(label) is not None for label in trace.labels])
    has_work = has_event | intervals.covers(_find_captures(trace), trace.start_ns[rows])
    lost_memory = is_memory & ~has_work
    if lost_memory.any() and np.median(trace.duration_ns[rows][lost_memory]) < _SHORTEST_MEMORY_CALL_NS:
        has_work |= lost_memory
    return MatchedLaunches(rows[~is_inner], is_memory[~is_inner], has_work[~is_inner])


def _find_captures(trace: Trace) -> Intervals:
    """When launches are recorded into a graph of CUDA or HIP, and are not carried out."""
    begins_ns, ends_ns = (
        np.sort(times_ns[trace.match_labels(trace.name, [word in label for label in trace.labels])])
        for times_ns, word in ((trace.start_ns, "StreamBeginCapture"), (trace.end_ns, "StreamEndCapture"))
    )
    later_ends_ns = np.append(ends_ns, trace.end_ns.max(initial=0))
    return intervals.merge_overlapping(begins_ns, later_ends_ns[np.searchsorted(ends_ns, begins_ns)])


def find_lacks(trace: Trace, is_counted: NDArray[np.bool_]) -> list[Lack]:
    """What the recording of a rank lacks. is_counted: which events of the GPU count, shape (number of events,)."""
    calls = find_launch_calls(trace)
    if not is_counted.any() and not len(calls.rows):
        library = trace.head.backend
        if library in _GPU_LIBRARIES:
            return [lack_gpu(f"the process group uses {library}")]
        return [lack_gpu("its head names a GPU")] if trace.head.gpu and library != "gloo" else []
    is_in_step = gloo.starts_in_steps(trace, trace.start_ns[calls.rows])
    is_kernel = is_counted & trace.has_category("kernel")
    lacks = (
        _describe_lost(trace, calls, is_in_step & ~calls.is_memory, "launches"),
        _describe_lost(trace, calls, is_in_step & calls.is_memory, "copies"),
        _find_overlaps(trace, np.flatnonzero(is_counted & (trace.stream >= 0))),
        _find_devices(trace, is_kernel),
    )
    return [lack for lack in lacks if lack is not None]


def lack_gpu(evidence: str) -> Lack:
    """The lack of a trace without any event of a GPU, although the rank used one. evidence: a clause that says how this is
    known."""
    text = f"the trace has no event of a GPU, although {evidence}: its figures are those of operators on the CPU."
    return Lack(kind="no gpu events", count=0, total=0, text=text)


def _describe_lost(trace: Trace, calls: MatchedLaunches, chosen: NDArray[np.bool_], kind: LackKind) -> Lack | None:
    """The launches or copies without an event. chosen: which of the calls are of this kind and lie in the profiled steps."""
    lost_rows = calls.rows[chosen & ~calls.has_work]
    if not len(lost_rows):
        return None
    by_step = Counter(step for step in gloo.find_steps_at(trace, trace.start_ns[lost_rows]) if step >= 0)
    by_stream = Counter(trace.stream[lost_rows].tolist())
    total, things = int(np.count_nonzero(chosen)), "launches" if kind == "launches" else "copies and sets of memory"
    steps = [f"{count:,} in step {step}" for step, count in sorted(by_step.items())]
    steps = [*steps[:_MOST_STEPS], *(["and others"] if len(steps) > _MOST_STEPS else [])]
    streams = [f"{count:,} on stream {stream}" for stream, count in sorted(by_stream.items()) if stream >= 0]
    where = f" ({', '.join([*steps, *streams])})" if steps or streams else ""
    bounds = "times of work are at least, and idle time is at most" if kind == "launches" else "idle time is at most"
    text = f"{len(lost_rows):,} of {total:,} {things} have no event of the GPU{where}: {bounds} the given time."
    return Lack(
        kind=kind,
        count=len(lost_rows),
        total=total,
        text=text,
        by_step=dict(by_step),
        by_stream=dict(sorted(by_stream.items())),
    )


def _find_overlaps(trace: Trace, rows: NDArray[np.intp]) -> Lack | None:
    """The work that runs over the start of the next work of its stream. rows: the indexes of the events of the GPU."""
    order = rows[np.lexsort((trace.start_ns[rows], trace.stream[rows], trace.device[rows]))]
    device, stream, correlation = trace.device[order], trace.stream[order], trace.correlation[order]
    # the kernels of one launch are those of a graph, which may run at the same time
    is_other_launch = (correlation[1:] != correlation[:-1]) | (correlation[1:] <= 0)
    is_same_stream = (device[1:] == device[:-1]) & (stream[1:] == stream[:-1])
    overlap_ns = np.where(is_same_stream & is_other_launch, trace.end_ns[order][:-1] - trace.start_ns[order][1:], 0)
    count = int(np.count_nonzero(overlap_ns > _LONGEST_OVERLAP_NS))
    if not count:
        return None
    text = (
        f"{count:,} of {len(rows):,} kernels and copies overlap the next one of the same stream, which cannot be, by up to "
        f"{overlap_ns.max() / 1e6:,.3f} ms: times of work are at most, and idle time is at least the given time."
    )
    return Lack(kind="overlaps", count=count, total=len(rows), text=text)


def _find_devices(trace: Trace, is_kernel: NDArray[np.bool_]) -> Lack | None:
    devices = list_devices(trace, is_kernel)
    if len(devices) < 2:
        return None
    names = ", ".join(f"GPU {device}" for device in devices)
    text = (
        f"{len(devices)} devices in one row ({names}): while one works, the others may be idle, so idle time is at least the "
    )
    text += "given time. The table of devices has a row for each."
    return Lack(kind="devices", count=len(devices), total=len(devices), text=text)


def list_devices(trace: Trace, is_kernel: NDArray[np.bool_]) -> list[int]:
    """The numbers of the GPUs that ran these kernels, sorted."""
    return sorted(set(np.flatnonzero(np.bincount(trace.device[is_kernel & (trace.device >= 0)])).tolist()))
