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
BoundKind = Literal["at least", "at most", "unknown"]
# The calls that put work on a GPU. A host function that is put into a stream is no work of the GPU.
_LAUNCH_CALL = re.compile(r"(?:cuda|cu|hip)(?:\w*Launch(?!HostFunc)\w*|Memcpy\w*|Memset\w*)\Z")
_MEMORY_CALL = re.compile(r"Memcpy|Memset")
# A call that copies or sets 0 bytes puts nothing on the GPU, and returns within half a microsecond; other calls take at least
# 3 us (traces of H100, PyTorch 2.6).
_SHORTEST_MEMORY_CALL_NS = 1000
# With programmatic dependent launch, a kernel may start up to 4 us before the end of the previous kernel (traces of B200).
_LONGEST_OVERLAP_NS = 10_000
_GPU_LIBRARIES = ("nccl", "rccl")
NO_GPU_WORK_SENTENCE = (
    "no figures, because the work of the GPU was not recorded. Usual reasons: the user may not read the GPU's counters "
    "(NVreg_RestrictProfilingToAdminUsers), or another profiler was attached."
)
_MOST_NAMED_STEPS = 8  # the most steps that a sentence names

_AT_LEAST_BOUNDS: dict[str, BoundKind] = dict.fromkeys(
    ("span_ns", "compute_ns", "communication_ns", "memory_ns", "overlap_ns"), "at least"
)
_UNKNOWN_BOUNDS: dict[str, BoundKind] = dict.fromkeys(("non_compute_ns", "exposed_communication_ns"), "unknown")
BOUNDS_BY_LACK: dict[LackKind, dict[str, BoundKind]] = {
    "launches": {**_AT_LEAST_BOUNDS, **_UNKNOWN_BOUNDS, "idle_ns": "at most"},
    "copies": {"memory_ns": "at least", "non_compute_ns": "at least", "idle_ns": "at most"},
    "overlaps": {**dict.fromkeys(_AT_LEAST_BOUNDS, "at most"), **_UNKNOWN_BOUNDS, "idle_ns": "at least"},
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


class LaunchCallMatches(NamedTuple):
    """The calls of a trace that put work on a GPU; the masks have the shape (number of calls,)."""

    rows: NDArray[np.intp]
    """The indexes of the calls in the trace."""
    is_memory: NDArray[np.bool_]
    """Which calls copy or set memory."""
    has_work: NDArray[np.bool_]
    """Which calls need no event of their own: an event of the GPU has their correlation, or they only recorded a graph."""


def find_launch_calls(trace: Trace) -> LaunchCallMatches:
    """Find the calls of the host that put work on a GPU, and which of them have an event of the GPU."""
    is_launch = [_LAUNCH_CALL.match(label) is not None for label in trace.labels]
    call_rows = np.flatnonzero(trace.has_category(*LAUNCH_CATEGORIES) & trace.match_labels(trace.name, is_launch))
    call_rows = call_rows[np.lexsort((-trace.duration_ns[call_rows], trace.start_ns[call_rows], trace.thread[call_rows]))]
    thread, category, call_ends_ns = trace.thread[call_rows], trace.category[call_rows], trace.end_ns[call_rows]
    has_event = np.isin(trace.correlation[call_rows], trace.correlation[trace.has_category(*GPU_CATEGORIES)])
    has_event |= trace.correlation[call_rows] <= 0  # it is not known which event belongs to the call
    # A call of the driver inside a call of the runtime is the same launch; the event has the correlation of one of the two.
    is_inner = np.zeros(len(call_rows), np.bool_)
    is_inner[1:] = (thread[1:] == thread[:-1]) & (category[1:] != category[:-1]) & (call_ends_ns[1:] <= call_ends_ns[:-1])
    outer_call = np.maximum.accumulate(np.where(is_inner, 0, np.arange(len(call_rows))))
    has_event = np.bincount(outer_call, has_event, len(call_rows))[outer_call] > 0 if len(call_rows) else has_event
    is_memory = trace.match_labels(trace.name[call_rows], [_MEMORY_CALL.search(label) is not None for label in trace.labels])
    has_work = has_event | intervals.find_covered(_find_captures(trace), trace.start_ns[call_rows])
    is_lost_memory = is_memory & ~has_work
    if is_lost_memory.any() and np.median(trace.duration_ns[call_rows][is_lost_memory]) < _SHORTEST_MEMORY_CALL_NS:
        has_work |= is_lost_memory
    return LaunchCallMatches(call_rows[~is_inner], is_memory[~is_inner], has_work[~is_inner])


def _find_captures(trace: Trace) -> Intervals:
    """When launches are recorded into a graph of CUDA or HIP, and are not carried out."""
    begins_ns, ends_ns = (
        np.sort(event_times_ns[trace.match_labels(trace.name, [call_word in label for label in trace.labels])])
        for event_times_ns, call_word in ((trace.start_ns, "StreamBeginCapture"), (trace.end_ns, "StreamEndCapture"))
    )
    later_ends_ns = np.append(ends_ns, trace.end_ns.max(initial=0))
    return intervals.merge_overlapping(begins_ns, later_ends_ns[np.searchsorted(ends_ns, begins_ns)])


def find_lacks(trace: Trace, is_counted: NDArray[np.bool_]) -> list[Lack]:
    """What the recording of a rank lacks. is_counted: which events of the GPU count, shape (number of events,)."""
    launch_calls = find_launch_calls(trace)
    if not is_counted.any() and not len(launch_calls.rows):
        backend_library = trace.head.backend
        if backend_library in _GPU_LIBRARIES:
            return [make_gpu_lack(f"the process group uses {backend_library}")]
        return [make_gpu_lack("its head names a GPU")] if trace.head.gpu and backend_library != "gloo" else []
    is_in_step = gloo.find_moments_in_steps(trace, trace.start_ns[launch_calls.rows])
    is_kernel = is_counted & trace.has_category("kernel")
    possible_lacks = (
        _describe_lost_work(trace, launch_calls, is_in_step & ~launch_calls.is_memory, "launches"),
        _describe_lost_work(trace, launch_calls, is_in_step & launch_calls.is_memory, "copies"),
        _find_overlapping_work(trace, np.flatnonzero(is_counted & (trace.stream >= 0))),
        _find_several_devices(trace, is_kernel),
    )
    return [lack for lack in possible_lacks if lack is not None]


def make_gpu_lack(evidence_clause: str) -> Lack:
    """The lack of a trace without any event of a GPU, although the rank used one. evidence_clause: a clause that says how this
    is known."""
    text = f"the trace has no event of a GPU, although {evidence_clause}: its figures are those of operators on the CPU."
    return Lack(kind="no gpu events", count=0, total=0, text=text)


def _describe_lost_work(trace: Trace, calls: LaunchCallMatches, chosen: NDArray[np.bool_], lack_kind: LackKind) -> Lack | None:
    """The launches or copies without an event. chosen: which of the calls are of this kind and lie in the profiled steps."""
    lost_rows = calls.rows[chosen & ~calls.has_work]
    if not len(lost_rows):
        return None
    count_by_step = Counter(step for step in gloo.find_steps_at(trace, trace.start_ns[lost_rows]) if step >= 0)
    by_stream = Counter(trace.stream[lost_rows].tolist())
    total, things_text = (int(np.count_nonzero(chosen)), "launches" if lack_kind == "launches" else "copies and sets of memory")
    step_texts = [f"{lost_count:,} in step {step}" for step, lost_count in sorted(count_by_step.items())]
    step_texts = [*step_texts[:_MOST_NAMED_STEPS], *(["and others"] if len(step_texts) > _MOST_NAMED_STEPS else [])]
    stream_texts = [f"{lost_count:,} on stream {stream}" for stream, lost_count in sorted(by_stream.items()) if stream >= 0]
    where_text = f" ({', '.join([*step_texts, *stream_texts])})" if step_texts or stream_texts else ""
    bounds_text = "times of work are at least, and idle time is at most" if lack_kind == "launches" else "idle time is at most"
    lack_sentence = f"{len(lost_rows):,} of {total:,} {things_text} have no event of the GPU{where_text}: {bounds_text} "
    lack_sentence += "the given time."
    return Lack(
        kind=lack_kind,
        count=len(lost_rows),
        total=total,
        text=lack_sentence,
        by_step=dict(count_by_step),
        by_stream=dict(sorted(by_stream.items())),
    )


def _find_overlapping_work(trace: Trace, gpu_rows: NDArray[np.intp]) -> Lack | None:
    """The work that runs over the start of the next work of its stream. gpu_rows: the indexes of the events of the GPU."""
    sorted_rows = gpu_rows[np.lexsort((trace.start_ns[gpu_rows], trace.stream[gpu_rows], trace.device[gpu_rows]))]
    device, stream, correlation_by_row = (trace.device[sorted_rows], trace.stream[sorted_rows], trace.correlation[sorted_rows])
    # the kernels of one launch are those of a graph, which may run at the same time
    is_other_launch = (correlation_by_row[1:] != correlation_by_row[:-1]) | (correlation_by_row[1:] <= 0)
    is_same_stream = (device[1:] == device[:-1]) & (stream[1:] == stream[:-1])
    overlap_ns = np.where(is_same_stream & is_other_launch, trace.end_ns[sorted_rows][:-1] - trace.start_ns[sorted_rows][1:], 0)
    overlap_count = int(np.count_nonzero(overlap_ns > _LONGEST_OVERLAP_NS))
    if not overlap_count:
        return None
    lack_sentence = (
        f"{overlap_count:,} of {len(gpu_rows):,} kernels and copies overlap the next one of the same stream, which cannot be, "
        f"by up to {overlap_ns.max() / 1e6:,.3f} ms: times of work are at most, and idle time is at least the given time."
    )
    return Lack(kind="overlaps", count=overlap_count, total=len(gpu_rows), text=lack_sentence)


def _find_several_devices(trace: Trace, is_kernel: NDArray[np.bool_]) -> Lack | None:
    devices = list_devices(trace, is_kernel)
    if len(devices) < 2:
        return None
    device_names = ", ".join(f"GPU {device}" for device in devices)
    lack_sentence = f"{len(devices)} devices in one row ({device_names}): while one works, the others may be idle, "
    lack_sentence += "so idle time is at least the given time. The table of devices has a row for each."
    return Lack(kind="devices", count=len(devices), total=len(devices), text=lack_sentence)


def list_devices(trace: Trace, is_kernel: NDArray[np.bool_]) -> list[int]:
    """The numbers of the GPUs that ran these kernels, sorted."""
    return sorted(set(np.flatnonzero(np.bincount(trace.device[is_kernel & (trace.device >= 0)])).tolist()))
