"""The events of a trace file from which a metric was computed: how many of each kind, and the first and the last of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from collect.explain.read_file import EventPlace, ReadEvents
from collect.traces import gloo, matrix_products, memory_use, trace
from collect.traces.activities import Activities, activities
from collect.traces.event_decoder import MEMORY
from collect.traces.trace import Trace

_Events = list[EventPlace]
_WORK = ("compute", "collectives", "memory operations")
# Field of a rank's figures (`Breakdown`, `RankAnalysis`) -> the kinds of events from which the field is computed. Time in which
# nothing runs is the time between all work. A field that is not here, such as the number of the rank, is no figure.
_KINDS: dict[str, tuple[str, ...]] = {
    "compute_ns": ("compute",),
    "communication_ns": ("collectives",),
    "overlap_ns": ("compute", "collectives"),
    "memory_ns": ("memory operations",),
    "non_compute_ns": _WORK,
    "idle_ns": _WORK,
    "span_ns": _WORK,
    "idle": _WORK,
    "collectives": ("collectives",),
    "calls": ("collectives",),
    "launches": ("launched work",),
    "memory": ("allocations",),
    "products": ("matrix products",),
    "steps": ("profiler steps",),
}


def read_events(path: Path, fields: Collection[str]) -> list[ReadEvents]:
    """The events of a trace file from which these fields of the rank's figures were computed. Reads the whole file.

    A kind of which the trace has no event is left out. Raises OSError if the file cannot be opened.
    """
    wanted = {kind for field in fields for kind in _KINDS.get(field, ())}
    if not wanted:
        return []
    found = trace.read(path)
    active = activities(found)
    if active is None:
        return []
    every = {kind: _READERS[kind](found, active) for kind in _READERS if kind in wanted}
    return [ReadEvents(kind, len(events), events[0], events[-1]) for kind, events in every.items() if events]


def _of_rows(found: Trace, rows: NDArray[np.intp]) -> _Events:
    """Events with a duration, sorted by start. rows: their indexes in the trace."""
    return _places(found, found.name[rows], found.start_ns[rows], found.duration_ns[rows])


def _places(found: Trace, name: NDArray[np.integer], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> _Events:
    order = np.argsort(start_ns, kind="stable")
    columns = (name[order].tolist(), start_ns[order].tolist(), duration_ns[order].tolist())
    return [EventPlace(found.labels[label], start, duration) for label, start, duration in zip(*columns, strict=True)]


def _compute(found: Trace, active: Activities) -> _Events:
    if active.source == "gpu":
        return _of_rows(found, active.rows[~active.is_collective & found.of_category("kernel")[active.rows]])
    on_host = gloo.activity(found)
    assert on_host is not None  # `activities` has a result without a GPU only if `gloo.activity` has one
    within = (found.end_ns > on_host.start_ns) & (found.start_ns < on_host.end_ns)
    return _of_rows(found, np.flatnonzero(on_host.computing & within))


def _collectives(found: Trace, active: Activities) -> _Events:
    return _of_rows(found, active.rows[active.is_collective])


def _memory_operations(found: Trace, active: Activities) -> _Events:
    return _of_rows(found, active.rows[found.of_category("gpu_memcpy", "gpu_memset")[active.rows]])


def _launched(found: Trace, active: Activities) -> _Events:
    return _of_rows(found, active.rows[active.launch_row >= 0])


def _allocations(found: Trace, active: Activities) -> _Events:
    devices = memory_use.counted_rows(found)
    chosen = [device for device in devices if device[0] != memory_use.CPU] or devices  # as `trace_details.peak` chooses
    every = [row for _, before, inside in chosen for row in (*before, *inside)]
    return [EventPlace(MEMORY, moment, 0) for moment in np.sort(found.details.memory.at_ns[every]).tolist()]


def _products(found: Trace, active: Activities) -> _Events:
    spans = matrix_products.timed_calls(found, active)
    return _places(found, spans.name, spans.start_ns, spans.end_ns - spans.start_ns)


def _steps(found: Trace, active: Activities) -> _Events:
    return _of_rows(found, np.flatnonzero(gloo.steps_of(found)))


_READERS: dict[str, Callable[[Trace, Activities], _Events]] = {
    "compute": _compute,
    "collectives": _collectives,
    "memory operations": _memory_operations,
    "launched work": _launched,
    "allocations": _allocations,
    "matrix products": _products,
    "profiler steps": _steps,
}
