"""The events of a trace file from which a metric was computed: how many of each kind, and the first and the last of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from collect.explain.read_file import EventPlace, ReadEvents
from collect.metric import EventKind
from collect.traces import gloo, matrix_products, memory_use, trace
from collect.traces.activities import Activities, find_activities
from collect.traces.event_decoder import MEMORY_EVENT_NAME
from collect.traces.trace import Trace

_Events = list[EventPlace]


def read_events(path: Path, event_kinds: Collection[EventKind]) -> list[ReadEvents]:
    """The events of these kinds in a trace file, each kind as the figures of the rank count it. Reads the whole file.

    A kind of which the trace has no event is left out. Raises OSError if the file cannot be opened.
    """
    loaded_trace = trace.read_trace(path)
    activities = find_activities(loaded_trace)
    if activities is None:
        return []
    events_by_kind = {kind: _READER_BY_KIND[kind](loaded_trace, activities) for kind in _READER_BY_KIND if kind in event_kinds}
    return [ReadEvents(kind, len(events), events[0], events[-1]) for kind, events in events_by_kind.items() if events]


def _list_events_of_rows(loaded_trace: Trace, rows: NDArray[np.intp]) -> _Events:
    """Events with a duration, sorted by start. rows: their indexes in the trace."""
    return _list_events(loaded_trace, loaded_trace.name[rows], loaded_trace.start_ns[rows], loaded_trace.duration_ns[rows])


def _list_events(
    loaded: Trace, label_numbers: NDArray[np.integer], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]
) -> _Events:
    start_order = np.argsort(start_ns, kind="stable")
    event_columns = (label_numbers[start_order].tolist(), start_ns[start_order].tolist(), duration_ns[start_order].tolist())
    return [EventPlace(loaded.labels[label], start, duration) for label, start, duration in zip(*event_columns, strict=True)]


def _list_compute_events(loaded: Trace, activities: Activities) -> _Events:
    if activities.source == "gpu":
        return _list_events_of_rows(
            loaded, activities.event_rows[~activities.is_collective & loaded.has_category("kernel")[activities.event_rows]]
        )
    cpu_activity = gloo.find_activity(loaded)
    assert cpu_activity is not None  # `find_activities` has a result without a GPU only if `gloo.find_activity` has one
    is_within = (loaded.end_ns > cpu_activity.start_ns) & (loaded.start_ns < cpu_activity.end_ns)
    return _list_events_of_rows(loaded, np.flatnonzero(cpu_activity.is_computing & is_within))


def _list_allocations(loaded_trace: Trace, activities: Activities) -> _Events:
    devices = memory_use.select_device_events(loaded_trace)
    # as in `find_profiled_memory_peak`
    counted_devices = [device for device in devices if device[0] != memory_use.CPU_DEVICE] or devices
    rows = [row for _, start_rows, step_rows in counted_devices for row in (*start_rows, *step_rows)]
    return [EventPlace(MEMORY_EVENT_NAME, at_ns, 0) for at_ns in np.sort(loaded_trace.details.memory.at_ns[rows]).tolist()]


def _list_product_events(loaded_trace: Trace, activities: Activities) -> _Events:
    timed_calls = matrix_products.find_timed_calls(loaded_trace, activities)
    return _list_events(loaded_trace, timed_calls.name, timed_calls.start_ns, timed_calls.end_ns - timed_calls.start_ns)


_READER_BY_KIND: dict[EventKind, Callable[[Trace, Activities], _Events]] = {
    "compute": _list_compute_events,
    "collectives": lambda loaded, active: _list_events_of_rows(loaded, active.event_rows[active.is_collective]),
    "memory operations": lambda loaded, active: _list_events_of_rows(
        loaded, active.event_rows[loaded.has_category("gpu_memcpy", "gpu_memset")[active.event_rows]]
    ),
    "launched work": lambda loaded, active: _list_events_of_rows(loaded, active.event_rows[active.launch_row >= 0]),
    "allocations": _list_allocations,
    "matrix products": _list_product_events,
    "profiler steps": lambda loaded, _: _list_events_of_rows(loaded, np.flatnonzero(gloo.find_steps(loaded))),
}
