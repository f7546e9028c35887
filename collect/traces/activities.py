"""Finds what runs on a rank at each moment: compute, collectives and memory operations, and the calls that launched them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo, intervals
from collect.traces.breakdown import Source, unknown_categories
from collect.traces.collective import GLOO, CollectiveOperation
from collect.traces.communication import kernel_communication
from collect.traces.intervals import Intervals
from collect.traces.launches import launches
from collect.traces.trace import Trace

_LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime", "privateuse1_runtime", "Runtime")


class Activities(NamedTuple):
    """What a rank does within [start_ns, end_ns). The same events count as in `breakdown`.

    rows: the work as indexes of events in the trace, sorted by start: on a GPU its kernels and memory operations, else the
    spans of gloo. The fields is_collective, operation and launch_row have one value for each of `rows`.
    is_collective: whether the event is a collective.
    operation: the index of the collective in `operations`; -1 if the event is not a collective.
    operations: the distinct collectives.
    launch_row: the index in the trace of the call that launched the event; -1 if it is not recorded, as always with gloo.
    compute, communication, memory: when at least one event of this kind runs. busy: when any event runs.
    host_collectives: when a collective runs on the host, or the host waits for a collective.
    operating: when an operator of the main thread runs; empty for a GPU.
    """

    source: Source
    start_ns: int
    end_ns: int
    rows: NDArray[np.intp]
    is_collective: NDArray[np.bool_]
    operation: NDArray[np.int32]
    operations: list[CollectiveOperation]
    launch_row: NDArray[np.intp]
    compute: Intervals
    communication: Intervals
    memory: Intervals
    busy: Intervals
    host_collectives: Intervals
    operating: Intervals


def activities(trace: Trace) -> Activities | None:
    """Find what a rank does at each moment, from its trace. None if `breakdown` has no result for the trace."""
    gpu = launches(trace)
    if not (gpu.counted | gpu.before_recording).any():
        return None if unknown_categories(trace) else _on_cpu(trace)
    kernel = gpu.counted & trace.of_category("kernel")
    memory = gpu.counted & ~kernel
    communicating = kernel_communication(trace, kernel)
    collective = communicating.rows
    rows = np.flatnonzero(kernel | memory)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    busy = intervals.of(trace, kernel | memory)
    on_host = trace.among(trace.name, [label.startswith(GLOO) for label in trace.labels]) & ~trace.of_category("cpu_op")
    return Activities(
        source="gpu",
        start_ns=int(busy.start[0]) if len(busy.start) else 0,
        end_ns=int(busy.end[-1]) if len(busy.end) else 0,
        rows=rows,
        is_collective=collective[rows],
        operation=communicating.operation[rows],
        operations=communicating.operations,
        launch_row=launch_rows(trace, rows),
        compute=intervals.of(trace, kernel & ~collective),
        communication=intervals.of(trace, collective),
        memory=intervals.of(trace, memory),
        busy=busy,
        host_collectives=intervals.of(trace, on_host),
        operating=intervals.NOTHING,
    )


def _on_cpu(trace: Trace) -> Activities | None:
    found = gloo.activity(trace)
    if found is None:
        return None
    spans = np.flatnonzero(found.collectives)
    names = gloo.meanings(trace, found)
    order = np.argsort(trace.start_ns[spans], kind="stable")
    rows = spans[order]
    each = gloo.operations(trace, found, names)
    places: dict[CollectiveOperation, int] = {}
    operation = np.array([places.setdefault(each[index], len(places)) for index in order], np.int32)
    return Activities(
        source="gloo" if len(rows) else "cpu",
        start_ns=found.start_ns,
        end_ns=found.end_ns,
        rows=rows,
        is_collective=np.ones(len(rows), bool),
        operation=operation,
        operations=list(places),
        launch_row=np.full(len(rows), -1, np.intp),
        compute=found.compute,
        communication=found.communication,
        memory=intervals.NOTHING,
        busy=intervals.either(found.compute, found.communication),
        host_collectives=intervals.of(trace, found.c10d),
        operating=intervals.of(trace, found.operators),
    )


def launch_rows(trace: Trace, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each event of a GPU, the index in the trace of the call that launched the event: the first call with its correlation
    id.

    rows: the indexes of the events of the GPU in the trace. The result is -1 for an event whose launching call is not recorded.
    """
    calls = np.flatnonzero(trace.of_category(*_LAUNCHES) & (trace.correlation > 0))
    calls = calls[np.lexsort((trace.start_ns[calls], trace.correlation[calls]))]
    wanted = trace.correlation[rows]
    place = np.searchsorted(trace.correlation[calls], wanted)
    known = (place < len(calls)) & (wanted > 0)
    found = np.full(len(rows), -1, np.intp)
    found[known] = calls[place[known]]
    return np.where((found >= 0) & (trace.correlation[found] == wanted), found, -1)
