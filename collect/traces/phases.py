"""Finds which phase of a step launched the work of a rank: data, forward, backward, optimizer or another part of the step.

The phase of a moment on the host is found by these rules, in this order:

1. Annotations: `Optimizer.step#` and `Optimizer.zero_grad#` (torch.optim), `enumerate(DataLoader)#` (torch.utils.data), and
   `record_function` with a name whose first word is data, forward, backward or optimizer (also: loss, optim, dataloader).
2. Autograd: an operator `autograd::engine::evaluate_function...` on any thread means backward. With a GPU, backward runs on
   threads of its own. So all work that is launched on a thread other than the main thread (the thread of the profiler steps)
   belongs to backward too, if the trace has an autograd operator on this thread.
3. Order: the rest of the main thread is forward if backward follows later in the same step, else `other`.

A kernel belongs to the phase in which it was launched, although it may run later.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo, intervals
from collect.traces.activities import Activities
from collect.traces.intervals import Intervals
from collect.traces.trace import Trace

Phase = Literal["data", "forward", "backward", "optimizer", "other"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer", "other")
_ANNOTATION_PATTERN_BY_PHASE: dict[
    Phase, re.Pattern[str]
] = {  # if a moment has annotations of several phases, the first phase here counts
    "data": re.compile(r"enumerate\(DataLoader\)#|(?:#+\s*)?(?:data|dataloader|data_loading|get_batch)\b", re.IGNORECASE),
    "optimizer": re.compile(
        r"Optimizer\.(?:step|zero_grad)#|(?:#+\s*)?(?:optimizer|optim|opt_step|optimizer_step)\b", re.IGNORECASE
    ),
    "backward": re.compile(r"(?:#+\s*)?(?:backward|bwd)\b", re.IGNORECASE),
    "forward": re.compile(r"(?:#+\s*)?(?:forward|fwd|loss)\b", re.IGNORECASE),
}


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a phase on one rank, all profiled steps together, in ns."""

    phase: Phase
    """Name of the phase."""
    host_ns: int
    """The time that the main thread spends in the phase; the sum over all phases is the time of the profiler steps."""
    device_ns: int | None
    """The time in which kernels or memory operations run that the phase launched."""
    compute_ns: int | None
    """The time in which compute kernels run that the phase launched; None on a CPU, where `host_ns` contains all work."""
    communication_ns: int | None
    """The time in which collectives run that the phase launched; None on a CPU, where `host_ns` contains all work."""


def compute_phase_times(trace: Trace, activities: Activities) -> list[PhaseTime]:
    """The times of the phases in a trace, in the order of a step; empty if the trace has no profiler steps."""
    is_step = gloo.find_steps(trace)
    if not is_step.any():
        return []
    main_thread = int(np.bincount(trace.thread[is_step]).argmax())
    host_time_by_phase = _divide_host_time(trace, is_step & (trace.thread == main_thread), main_thread)
    if activities.source != "gpu":
        return [
            PhaseTime(phase=phase, host_ns=host_time.length, device_ns=None, compute_ns=None, communication_ns=None)
            for phase, host_time in host_time_by_phase.items()
            if host_time.length
        ]
    launch_phases = find_launch_phases(trace, activities, host_time_by_phase, main_thread)
    phase_times = []
    for phase_index, phase in enumerate(PHASES):
        is_in_phase = launch_phases == phase_index
        event_rows = activities.event_rows[is_in_phase]
        is_collective = activities.is_collective[is_in_phase]
        is_memory = trace.has_category("gpu_memcpy", "gpu_memset")[event_rows]
        compute, communication = (
            intervals.merge_events(trace, event_rows[mask]) for mask in (~is_collective & ~is_memory, is_collective)
        )
        if host_time_by_phase[phase].length or len(event_rows):
            phase_times.append(
                PhaseTime(
                    phase=phase,
                    host_ns=host_time_by_phase[phase].length,
                    device_ns=intervals.merge_events(trace, event_rows).length,
                    compute_ns=compute.length,
                    communication_ns=communication.length,
                )
            )
    return phase_times


def find_launch_phases(
    trace: Trace, activities: Activities, host_time_by_phase: dict[Phase, Intervals], main_thread: int
) -> NDArray[np.int8]:
    """For each of `activities.event_rows`, the index in PHASES of the phase that launched the work.

    -1 if the launch is not recorded, or if it was in no profiler step. host_time_by_phase: the time of each phase on the main
    thread. main: the number of the main thread."""
    autograd_threads = np.unique(trace.thread[gloo.find_autograd_nodes(trace)])
    launch_ns, launch_threads = trace.start_ns[activities.launch_row], trace.thread[activities.launch_row]
    phase_by_event = np.full(len(activities.event_rows), -1, np.int8)
    for phase_number, phase in enumerate(PHASES):
        phase_by_event[intervals.find_covered(host_time_by_phase[phase], launch_ns)] = phase_number
    phase_by_event[(phase_by_event >= 0) & np.isin(launch_threads, autograd_threads[autograd_threads != main_thread])] = (
        PHASES.index("backward")
    )
    phase_by_event[activities.launch_row < 0] = -1
    return phase_by_event


def _divide_host_time(trace: Trace, is_step: NDArray[np.bool_], main_thread: int) -> dict[Phase, Intervals]:
    """The time of each phase on the main thread. The phases are disjoint, and together they are the time of the steps."""
    remaining = intervals.merge_events(trace, is_step)
    is_annotation = trace.has_category("user_annotation", "cpu_op") & (trace.thread == main_thread) & ~is_step
    time_by_phase: dict[Phase, Intervals] = {}
    for phase, pattern in _ANNOTATION_PATTERN_BY_PHASE.items():
        is_named = trace.match_labels(trace.name, [pattern.match(label) is not None for label in trace.labels])
        time_by_phase[phase] = intervals.intersect_intervals(remaining, intervals.merge_events(trace, is_annotation & is_named))
        remaining = intervals.subtract_intervals(remaining, time_by_phase[phase])
    is_node = gloo.find_autograd_nodes(trace)
    autograd_time = intervals.intersect_intervals(
        remaining, _close_autograd_gaps(trace, intervals.merge_events(trace, is_node), main_thread)
    )
    time_by_phase["backward"] = intervals.unite_intervals(time_by_phase["backward"], autograd_time)
    remaining = intervals.subtract_intervals(remaining, autograd_time)
    last_backward_ns = _find_last_backward_starts(trace, is_step, time_by_phase["backward"])
    forward = intervals.intersect_intervals(remaining, intervals.merge_overlapping(trace.start_ns[is_step], last_backward_ns))
    time_by_phase["forward"] = intervals.unite_intervals(time_by_phase["forward"], forward)
    time_by_phase["other"] = intervals.subtract_intervals(remaining, forward)
    return {phase: time_by_phase[phase] for phase in PHASES}


def _close_autograd_gaps(trace: Trace, autograd_time: Intervals, main_thread: int) -> Intervals:
    """The time of autograd. A gap between two of its nodes is included if the main thread starts no operator in the gap."""
    operator_starts_ns = np.sort(trace.start_ns[trace.has_category("cpu_op") & (trace.thread == main_thread)])
    operator_starts_ns = operator_starts_ns[~intervals.find_covered(autograd_time, operator_starts_ns)]
    gap_starts_ns, gap_ends_ns = autograd_time.end[:-1], autograd_time.start[1:]
    is_empty = np.searchsorted(operator_starts_ns, gap_starts_ns) == np.searchsorted(operator_starts_ns, gap_ends_ns)
    return intervals.unite_intervals(autograd_time, intervals.merge_overlapping(gap_starts_ns[is_empty], gap_ends_ns[is_empty]))


def _find_last_backward_starts(trace: Trace, is_step: NDArray[np.bool_], backward_time: Intervals) -> NDArray[np.int64]:
    """For each step, the start of the last interval of backward that begins in the step; if there is none, the start of the
    step."""
    step_starts_ns, step_ends_ns = trace.start_ns[is_step], trace.end_ns[is_step]
    interval_index = np.searchsorted(backward_time.start, step_ends_ns) - 1
    latest_start_ns = backward_time.start[np.maximum(interval_index, 0)] if len(backward_time.start) else step_starts_ns
    return np.where((interval_index >= 0) & (latest_start_ns >= step_starts_ns), latest_start_ns, step_starts_ns)
