"""Which events of a GPU belong to the profiled steps: those that were launched in a step, as far as the trace knows it.

A GPU works off a queue, so a recording begins with kernels whose launch lies before it. They say nothing about the recorded
steps. Kineto joins a kernel to the call that launched it by `correlation`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import intervals
from collect.traces.trace import Trace

STEP = re.compile(r"ProfilerStep\s*#\s*\d+")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_GPU = (*GPU_CATEGORIES, "gpu_user_annotation", "cuda_sync")


class Launches(NamedTuple):
    """The events of a GPU by their launch, each shape (events,).

    counted: of the profiled steps, or of the whole recording where it has no steps; those whose launch is not known as well.
    before_recording: queued before the recording began. outside_steps: launched in the recording, but in none of its steps.
    """

    counted: NDArray[np.bool_]
    before_recording: NDArray[np.bool_]
    outside_steps: NDArray[np.bool_]


def launches(trace: Trace) -> Launches:
    """Tell the kernels, copies and sets of memory of a trace apart by their launch.

    An event was queued before the recording if the trace has no launch for it, its correlation is lower than that of any
    launch, and no event of its stream that was launched in the recording starts earlier: streams run in order.
    """
    gpu = trace.of_category(*GPU_CATEGORIES)
    none = np.zeros(len(gpu), np.bool_)
    rows = np.flatnonzero(gpu & (trace.correlation >= 0))
    host = ~trace.of_category(*_ON_GPU)
    calls = np.flatnonzero(host & (trace.correlation >= 0))
    calls = calls[np.isin(trace.correlation[calls], trace.correlation[rows])]
    if not len(calls):
        return Launches(gpu, none, none)
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    numbers = trace.correlation[calls]
    at = np.minimum(np.searchsorted(numbers, trace.correlation[rows]), len(numbers) - 1)
    known = numbers[at] == trace.correlation[rows]
    before, outside = none.copy(), none.copy()
    before[rows] = ~known & (trace.correlation[rows] < numbers[0]) & _leads(trace, rows, known)
    step = host & trace.among(trace.name, [STEP.match(label) is not None for label in trace.labels])
    if step.any():
        launched = trace.start_ns[calls[at[known]]]
        outside[rows[known]] = ~intervals.covers(intervals.of(trace, step), launched)
    if (outside | before)[gpu].all():  # steps that launch nothing say nothing about the rest
        outside = none
    return Launches(gpu & ~before & ~outside, before, outside)


def _leads(trace: Trace, rows: NDArray[np.intp], known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows start before every row of their stream whose launch is known."""
    streams, index = np.unique(trace.stream[rows], return_inverse=True)
    first = np.full(len(streams), np.iinfo(np.int64).max)
    np.minimum.at(first, index[known], trace.start_ns[rows[known]])
    return np.asarray(trace.start_ns[rows] < first[index])
