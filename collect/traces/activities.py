"""Finds what runs on a rank at each moment: compute, collectives and memory operations, and the calls that launched them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo, intervals
from collect.traces.breakdown import Source, is_trace_of_cpu
from collect.traces.collective import CollectiveOperation, is_gloo_name
from collect.traces.communication import find_communication
from collect.traces.intervals import Intervals
from collect.traces.launches import LAUNCH_CATEGORIES, divide_by_launch
from collect.traces.trace import Trace


class Activities(NamedTuple):
    """What a rank does within [start_ns, end_ns). The same events count as in `breakdown`."""

    source: Source
    start_ns: int
    end_ns: int
    event_rows: NDArray[np.intp]
    """The work as indexes of events in the trace, sorted by start: on a GPU its kernels and memory operations, else the spans
    of gloo. The fields is_collective, operation and launch_row have one value for each of `rows`."""
    is_collective: NDArray[np.bool_]
    """Whether the event is a collective."""
    operation_index: NDArray[np.int32]
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
    if not (gpu_events.is_counted | gpu_events.before_recording).any():
        return _find_cpu_activities(trace) if is_trace_of_cpu(trace) else None
    is_kernel = gpu_events.is_counted & trace.has_category("kernel")
    is_memory = gpu_events.is_counted & ~is_kernel
    communication_kernels = find_communication(trace, is_kernel)
    is_collective = communication_kernels.is_communication
    event_rows = np.flatnonzero(is_kernel | is_memory)
    event_rows = event_rows[np.argsort(trace.start_ns[event_rows], kind="stable")]
    busy = intervals.merge_events(trace, is_kernel | is_memory)
    is_gloo_span = trace.match_labels(trace.name, [is_gloo_name(label) for label in trace.labels]) & ~trace.has_category(
        "cpu_op"
    )
    return Activities(
        source="gpu",
        start_ns=int(busy.start[0]) if len(busy.start) else 0,
        end_ns=int(busy.end[-1]) if len(busy.end) else 0,
        event_rows=event_rows,
        is_collective=is_collective[event_rows],
        operation_index=communication_kernels.operation_index[event_rows],
        operations=communication_kernels.operations,
        launch_row=find_launch_rows(trace, event_rows),
        compute=intervals.merge_events(trace, is_kernel & ~is_collective),
        communication=intervals.merge_events(trace, is_collective),
        memory=intervals.merge_events(trace, is_memory),
        busy=busy,
        host_collectives=intervals.merge_events(trace, is_gloo_span),
        operating=intervals.NO_INTERVALS,
    )


def _find_cpu_activities(trace: Trace) -> Activities | None:
    cpu_activity = gloo.find_activity(trace)
    if cpu_activity is None:
        return None
    span_rows = np.flatnonzero(cpu_activity.is_collective)
    collective_names = gloo.name_collectives(trace, cpu_activity)
    order_by_start = np.argsort(trace.start_ns[span_rows], kind="stable")
    span_rows_by_start = span_rows[order_by_start]
    operation_by_span = gloo.find_span_operations(trace, cpu_activity, collective_names)
    number_by_operation: dict[CollectiveOperation, int] = {}
    operation_index_by_span = np.array(
        [number_by_operation.setdefault(operation_by_span[index], len(number_by_operation)) for index in order_by_start],
        np.int32,
    )
    return Activities(
        source="gloo" if len(span_rows_by_start) else "cpu",
        start_ns=cpu_activity.start_ns,
        end_ns=cpu_activity.end_ns,
        event_rows=span_rows_by_start,
        is_collective=np.ones(len(span_rows_by_start), bool),
        operation_index=operation_index_by_span,
        operations=list(number_by_operation),
        launch_row=np.full(len(span_rows_by_start), -1, np.intp),
        compute=cpu_activity.compute,
        communication=cpu_activity.communication,
        memory=intervals.NO_INTERVALS,
        busy=intervals.unite_intervals(cpu_activity.compute, cpu_activity.communication),
        host_collectives=intervals.merge_events(trace, cpu_activity.is_c10d),
        operating=intervals.merge_events(trace, cpu_activity.is_operator),
    )


def find_launch_rows(trace: Trace, event_rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each event of a GPU, the index in the trace of the call that launched the event: the first call with its correlation
    id.

    event_rows: the indexes of the events of the GPU in the trace. The result is -1 for an event whose launching call is not
    recorded."""
    launch_rows = np.flatnonzero(trace.has_category(*LAUNCH_CATEGORIES) & (trace.correlation > 0))
    launch_rows = launch_rows[np.lexsort((trace.start_ns[launch_rows], trace.correlation[launch_rows]))]
    correlation_ids = trace.correlation[event_rows]
    position_of_call = np.searchsorted(trace.correlation[launch_rows], correlation_ids)
    in_range = (position_of_call < len(launch_rows)) & (correlation_ids > 0)
    call_rows = np.full(len(event_rows), -1, np.intp)
    call_rows[in_range] = launch_rows[position_of_call[in_range]]
    return np.where((call_rows >= 0) & (trace.correlation[call_rows] == correlation_ids), call_rows, -1)
