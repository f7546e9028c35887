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
STEP_NAME = re.compile(r"ProfilerStep\s*#\s*([0-9]{1,18})\Z")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime", "privateuse1_runtime", "Runtime")
_DEVICE_CATEGORIES = (*GPU_CATEGORIES, "gpu_user_annotation", "cuda_sync")


class GpuEventsByLaunch(NamedTuple):
    """The events of a GPU by the time of their launch, as three masks of shape (number of events,)."""

    is_counted: NDArray[np.bool_]
    """Events that were launched in a profiler step, or all events if the recording has no profiler steps. An event whose launch
    is not recorded also counts, unless it was launched before the recording."""
    before_recording: NDArray[np.bool_]
    """Events that were launched before the recording began."""
    outside_steps: NDArray[np.bool_]
    """Events that were launched during the recording, but outside of its profiler steps."""


def divide_by_launch(trace: Trace) -> GpuEventsByLaunch:
    """Divide the kernels, memory copies and memory sets of a trace by the time of their launch.

    An event was launched before the recording if three conditions hold: the trace has no launch for the event, the correlation
    of the event is lower than the correlation of any launch, and no event of the same stream that was launched in the recording
    starts earlier (a stream runs its work in order).
    """
    is_gpu = trace.has_category(*GPU_CATEGORIES)
    no_event_mask = np.zeros(len(is_gpu), np.bool_)
    gpu_rows = np.flatnonzero(is_gpu & (trace.correlation >= 0))
    is_host_event = ~trace.has_category(*_DEVICE_CATEGORIES)
    call_rows = np.flatnonzero(is_host_event & (trace.correlation >= 0))
    call_rows = call_rows[np.isin(trace.correlation[call_rows], trace.correlation[gpu_rows])]
    if not len(call_rows):
        return GpuEventsByLaunch(is_gpu, no_event_mask, no_event_mask)
    call_rows = call_rows[np.argsort(trace.correlation[call_rows], kind="stable")]
    call_ids = trace.correlation[call_rows]
    call_positions = np.minimum(np.searchsorted(call_ids, trace.correlation[gpu_rows]), len(call_ids) - 1)
    launch_known = call_ids[call_positions] == trace.correlation[gpu_rows]
    is_before_recording, is_outside_steps = no_event_mask.copy(), no_event_mask.copy()
    is_before_recording[gpu_rows] = (
        ~launch_known & (trace.correlation[gpu_rows] < call_ids[0]) & _find_earliest_events(trace, gpu_rows, launch_known)
    )
    is_step = is_host_event & trace.match_labels(trace.name, [STEP_NAME.match(label) is not None for label in trace.labels])
    if is_step.any():
        launch_ns = trace.start_ns[call_rows[call_positions[launch_known]]]
        is_outside_steps[gpu_rows[launch_known]] = ~intervals.find_covered(intervals.merge_events(trace, is_step), launch_ns)
    if (is_outside_steps | is_before_recording)[
        is_gpu
    ].all():  # no event was launched in a step, so events that were launched outside of steps count
        is_outside_steps = no_event_mask
    return GpuEventsByLaunch(is_gpu & ~is_before_recording & ~is_outside_steps, is_before_recording, is_outside_steps)


def _find_earliest_events(trace: Trace, event_rows: NDArray[np.intp], is_launch_known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which events start before every event of the same stream whose launch is known. event_rows: the indexes of the events in
    the trace."""
    stream_numbers, stream_index_by_event = np.unique(trace.stream[event_rows], return_inverse=True)
    first_known_ns = np.full(len(stream_numbers), np.iinfo(np.int64).max)
    np.minimum.at(first_known_ns, stream_index_by_event[is_launch_known], trace.start_ns[event_rows[is_launch_known]])
    return np.asarray(trace.start_ns[event_rows] < first_known_ns[stream_index_by_event])
