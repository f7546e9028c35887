"""Finds which events of a GPU belong to the profiled steps: the events that were launched in a profiled step.

A GPU takes its work from a queue. So a recording begins with kernels that were launched before the recording; these kernels do
not belong to the recorded steps. Kineto gives a kernel and the call that launched it the same number, `correlation`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import intervals
from collect.traces.trace import Trace

# The name of a profiler step, with its number. More than 18 digits are too many for 64 bits.
STEP = re.compile(r"ProfilerStep\s*#\s*([0-9]{1,18})\Z")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_GPU = (*GPU_CATEGORIES, "gpu_user_annotation", "cuda_sync")


class Launches(NamedTuple):
    """The events of a GPU by the time of their launch, as three masks of shape (number of events,)."""

    counted: NDArray[np.bool_]
    """Events that were launched in a profiler step, or all events if the recording has no profiler steps. An event whose launch
    is not recorded also counts, unless it was launched before the recording."""
    before_recording: NDArray[np.bool_]
    """Events that were launched before the recording began."""
    outside_steps: NDArray[np.bool_]
    """Events that were launched during the recording, but outside of its profiler steps."""


def divide_by_launch(trace: Trace) -> Launches:
    """Divide the kernels, memory copies and memory sets of a trace by the time of their launch.

    An event was launched before the recording if three conditions hold: the trace has no launch for the event, the correlation
    of the event is lower than the correlation of any launch, and no event of the same stream that was launched in the recording
    starts earlier (a stream runs its work in order).
    """
    gpu = trace.has_category(*GPU_CATEGORIES)
    no_events = np.zeros(len(gpu), np.bool_)
    rows = np.flatnonzero(gpu & (trace.correlation >= 0))
    host = ~trace.has_category(*_ON_GPU)
    calls = np.flatnonzero(host & (trace.correlation >= 0))
    calls = calls[np.isin(trace.correlation[calls], trace.correlation[rows])]
    if not len(calls):
        return Launches(gpu, no_events, no_events)
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    numbers = trace.correlation[calls]
    position = np.minimum(np.searchsorted(numbers, trace.correlation[rows]), len(numbers) - 1)
    launch_known = numbers[position] == trace.correlation[rows]
    before, outside = no_events.copy(), no_events.copy()
    before[rows] = ~launch_known & (trace.correlation[rows] < numbers[0]) & _starts_first(trace, rows, launch_known)
    step = host & trace.match_labels(trace.name, [STEP.match(label) is not None for label in trace.labels])
    if step.any():
        launched = trace.start_ns[calls[position[launch_known]]]
        outside[rows[launch_known]] = ~intervals.covers(intervals.event_spans(trace, step), launched)
    if (outside | before)[gpu].all():  # no event was launched in a step, so events that were launched outside of steps count
        outside = no_events
    return Launches(gpu & ~before & ~outside, before, outside)


def _starts_first(trace: Trace, rows: NDArray[np.intp], launch_known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which events start before every event of the same stream whose launch is known. rows: the indexes of the events in the
    trace."""
    streams, index = np.unique(trace.stream[rows], return_inverse=True)
    first = np.full(len(streams), np.iinfo(np.int64).max)
    np.minimum.at(first, index[launch_known], trace.start_ns[rows[launch_known]])
    return np.asarray(trace.start_ns[rows] < first[index])
