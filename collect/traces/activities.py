"""Finds what runs on a rank at each moment: compute, collectives and memory operations, and the calls that launched them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo, intervals
from collect.traces.breakdown import Source, count_unknown_categories
from collect.traces.collective import GLOO, CollectiveOperation
from collect.traces.communication import find_communication
from collect.traces.intervals import Intervals
from collect.traces.launches import divide_by_launch
from collect.traces.trace import Trace

_LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime", "privateuse1_runtime", "Runtime")


class Activities(NamedTuple):
    """What a rank does within [start_ns, end_ns). The same events count as in `breakdown`."""

    source: Source
    start_ns: int
    end_ns: int
    rows: NDArray[np.intp]
    """The work as indexes of events in the trace, sorted by start: on a GPU its kernels and memory operations, else the spans
    of gloo. The fields is_collective, operation and launch_row have one value for each of `rows`."""
    is_collective: NDArray[np.bool_]
    """Whether the event is a collective."""
    operation: NDArray[np.int32]
    """The index of the collective in `operations`; -1 if the event is not a collective."""
    operations: list[CollectiveOperation]
    """The distinct collectives."""
    launch_row: NDArray[np.intp]
    """The index in the trace of the call that launched the event; -1 if it is not recorded, as always with gloo."""
    compute: Intervals
    """When at least one kernel that computes runs."""
    communication: Intervals
    """When at least one collective runs."""
    memory: Intervals
    """When at least one memory operation runs."""
    busy: Intervals
    """When any event runs."""
    host_collectives: Intervals
    """When a collective runs on the host, or the host waits for a collective."""
    operating: Intervals
    """When an operator of the main thread runs; empty for a GPU."""


def find_activities(trace: Trace) -> Activities | None:
    """Find what a rank does at each moment, from its trace. None if `breakdown` has no result for the trace."""
    gpu_events = divide_by_launch(trace)
    if not (gpu_events.counted | gpu_events.before_recording).any():
        return None if count_unknown_categories(trace) else _find_cpu_activities(trace)
    kernel = gpu_events.counted & trace.has_category("kernel")
    memory = gpu_events.counted & ~kernel
    communicating = find_communication(trace, kernel)
    collective = communicating.rows
    rows = np.flatnonzero(kernel | memory)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    busy = intervals.event_spans(trace, kernel | memory)
    on_host = trace.match_labels(trace.name, [label.startswith(GLOO) for label in trace.labels]) & ~trace.has_category("cpu_op")
    return Activities(
        source="gpu",
        start_ns=int(busy.start[0]) if len(busy.start) else 0,
        end_ns=int(busy.end[-1]) if len(busy.end) else 0,
        rows=rows,
        is_collective=collective[rows],
        operation=communicating.operation[rows],
        operations=communicating.operations,
        launch_row=find_launch_rows(trace, rows),
        compute=intervals.event_spans(trace, kernel & ~collective),
        communication=intervals.event_spans(trace, collective),
        memory=intervals.event_spans(trace, memory),
        busy=busy,
        host_collectives=intervals.event_spans(trace, on_host),
        operating=intervals.NO_INTERVALS,
    )


def _find_cpu_activities(trace: Trace) -> Activities | None:
    cpu_activity = gloo.find_activity(trace)
    if cpu_activity is None:
        return None
    spans = np.flatnonzero(cpu_activity.collectives)
    names = gloo.name_collectives(trace, cpu_activity)
    order = np.argsort(trace.start_ns[spans], kind="stable")
    rows = spans[order]
    span_operations = gloo.find_span_operations(trace, cpu_activity, names)
    indexes: dict[CollectiveOperation, int] = {}
    operation = np.array([indexes.setdefault(span_operations[index], len(indexes)) for index in order], np.int32)
    return Activities(
        source="gloo" if len(rows) else "cpu",
        start_ns=cpu_activity.start_ns,
        end_ns=cpu_activity.end_ns,
        rows=rows,
        is_collective=np.ones(len(rows), bool),
        operation=operation,
        operations=list(indexes),
        launch_row=np.full(len(rows), -1, np.intp),
        compute=cpu_activity.compute,
        communication=cpu_activity.communication,
        memory=intervals.NO_INTERVALS,
        busy=intervals.unite_intervals(cpu_activity.compute, cpu_activity.communication),
        host_collectives=intervals.event_spans(trace, cpu_activity.c10d),
        operating=intervals.event_spans(trace, cpu_activity.operators),
    )


def find_launch_rows(trace: Trace, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each event of a GPU, the index in the trace of the call that launched the event: the first call with its correlation
    id.

    rows: the indexes of the events of the GPU in the trace. The result is -1 for an event whose launching call is not recorded.
    """
    calls = np.flatnonzero(trace.has_category(*_LAUNCHES) & (trace.correlation > 0))
    calls = calls[np.lexsort((trace.start_ns[calls], trace.correlation[calls]))]
    correlation_ids = trace.correlation[rows]
    position = np.searchsorted(trace.correlation[calls], correlation_ids)
    in_range = (position < len(calls)) & (correlation_ids > 0)
    call_rows = np.full(len(rows), -1, np.intp)
    call_rows[in_range] = calls[position[in_range]]
    return np.where((call_rows >= 0) & (trace.correlation[call_rows] == correlation_ids), call_rows, -1)
