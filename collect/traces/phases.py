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
_ANNOTATIONS: dict[Phase, re.Pattern[str]] = {  # if a moment has annotations of several phases, the first phase here counts
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
    steps = gloo.find_steps(trace)
    if not steps.any():
        return []
    main_thread = int(np.bincount(trace.thread[steps]).argmax())
    host = _divide_host_time(trace, steps & (trace.thread == main_thread), main_thread)
    if activities.source != "gpu":
        return [
            PhaseTime(phase=phase, host_ns=host_time.length, device_ns=None, compute_ns=None, communication_ns=None)
            for phase, host_time in host.items()
            if host_time.length
        ]
    launched = find_launch_phases(trace, activities, host, main_thread)
    times = []
    for index, phase in enumerate(PHASES):
        in_phase = launched == index
        rows = activities.rows[in_phase]
        collective = activities.is_collective[in_phase]
        memory = trace.has_category("gpu_memcpy", "gpu_memset")[rows]
        compute, communication = (intervals.event_spans(trace, rows[mask]) for mask in (~collective & ~memory, collective))
        if host[phase].length or len(rows):
            times.append(
                PhaseTime(
                    phase=phase,
                    host_ns=host[phase].length,
                    device_ns=intervals.event_spans(trace, rows).length,
                    compute_ns=compute.length,
                    communication_ns=communication.length,
                )
            )
    return times


def find_launch_phases(trace: Trace, activities: Activities, host: dict[Phase, Intervals], tid: int) -> NDArray[np.int8]:
    """For each of `active.rows`, the index in PHASES of the phase that launched the work.

    -1 if the launch is not recorded, or if it was in no profiler step. host: the time of each phase on the main thread. main:
    the number of the main thread.
    """
    autograd = np.unique(trace.thread[gloo.find_autograd(trace)])
    moment, thread = trace.start_ns[activities.launch_row], trace.thread[activities.launch_row]
    phase_index = np.full(len(activities.rows), -1, np.int8)
    for index, phase in enumerate(PHASES):
        phase_index[intervals.covers(host[phase], moment)] = index
    phase_index[(phase_index >= 0) & np.isin(thread, autograd[autograd != tid])] = PHASES.index("backward")
    phase_index[activities.launch_row < 0] = -1
    return phase_index


def _divide_host_time(trace: Trace, steps: NDArray[np.bool_], tid: int) -> dict[Phase, Intervals]:
    """The time of each phase on the main thread. The phases are disjoint, and together they are the time of the steps."""
    remaining = intervals.event_spans(trace, steps)
    annotations = trace.has_category("user_annotation", "cpu_op") & (trace.thread == tid) & ~steps
    time_of_phase: dict[Phase, Intervals] = {}
    for phase, pattern in _ANNOTATIONS.items():
        is_named = trace.match_labels(trace.name, [pattern.match(label) is not None for label in trace.labels])
        time_of_phase[phase] = intervals.intersect_intervals(remaining, intervals.event_spans(trace, annotations & is_named))
        remaining = intervals.subtract_intervals(remaining, time_of_phase[phase])
    autograd = gloo.find_autograd(trace)
    differentiating = intervals.intersect_intervals(remaining, _close_gaps(trace, intervals.event_spans(trace, autograd), tid))
    time_of_phase["backward"] = intervals.unite_intervals(time_of_phase["backward"], differentiating)
    remaining = intervals.subtract_intervals(remaining, differentiating)
    last = _find_last_backward(trace, steps, time_of_phase["backward"])
    forward = intervals.intersect_intervals(remaining, intervals.merge_overlapping(trace.start_ns[steps], last))
    time_of_phase["forward"] = intervals.unite_intervals(time_of_phase["forward"], forward)
    time_of_phase["other"] = intervals.subtract_intervals(remaining, forward)
    return {phase: time_of_phase[phase] for phase in PHASES}


def _close_gaps(trace: Trace, autograd: Intervals, tid: int) -> Intervals:
    """The time of autograd. A gap between two of its nodes is included if the main thread starts no operator in the gap."""
    operators = np.sort(trace.start_ns[trace.has_category("cpu_op") & (trace.thread == tid)])
    operators = operators[~intervals.covers(autograd, operators)]
    first, last = autograd.end[:-1], autograd.start[1:]
    is_empty = np.searchsorted(operators, first) == np.searchsorted(operators, last)
    return intervals.unite_intervals(autograd, intervals.merge_overlapping(first[is_empty], last[is_empty]))


def _find_last_backward(trace: Trace, steps: NDArray[np.bool_], backward: Intervals) -> NDArray[np.int64]:
    """For each step, the start of the last interval of backward that begins in the step; if there is none, the start of the
    step."""
    start, end = trace.start_ns[steps], trace.end_ns[steps]
    position = np.searchsorted(backward.start, end) - 1
    latest = backward.start[np.maximum(position, 0)] if len(backward.start) else start
    return np.where((position >= 0) & (latest >= start), latest, start)
