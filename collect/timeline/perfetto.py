"""Writes a timeline as a file for ui.perfetto.dev, a program that shows traces, in the trace event format of Chrome.

Each host is shown as a process, and each rank, thread or stream as a row of this process.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from collect.timeline.timeline import RowSpans, RunTimeline
from shardlab.files import files


def write_perfetto_file(path: Path, timeline: RunTimeline, trace_spans: Iterable[RowSpans], host_suffix: str = "") -> int:
    """Write the file, compressed if its name ends in .gz. Returns the number of events in the file.

    trace_spans: the events of traces (`timeline.list_trace_spans`). host_suffix: follows the name of each host. Times in the
    file are in microseconds since the first moment of the timeline; `otherData.began_s` is this moment in seconds since the
    epoch. Raises WorkspaceError if the file cannot be written."""
    zero_s = _find_first_time_s(timeline)
    event_count = 0
    with files.as_workspace_error("write"):
        temporary_path = path.with_name(f".{path.name}.unfinished")
        temporary_path.unlink(missing_ok=True)
        with gzip.open(temporary_path, "xt") if path.suffix == ".gz" else temporary_path.open("x") as file:
            file_metadata = {"run": timeline.run_id, "began_s": zero_s, "uncorrected_hosts": timeline.uncorrected_hosts}
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(file_metadata)}, "traceEvents": [\n')
            for event in _list_trace_events(timeline, trace_spans, zero_s, host_suffix):
                file.write(f"{',' if event_count else ''}{json.dumps(event)}\n")
                event_count += 1
            file.write("]}\n")
        temporary_path.replace(path)
    return event_count


def _find_first_time_s(timeline: RunTimeline) -> float:
    first_times_s = [float(spans.start_s.min()) for spans in (*timeline.steps, *timeline.instruments) if len(spans.start_s)]
    first_times_s += [float(spans.at_s.min()) for spans in timeline.counters] + [moment.at_s for moment in timeline.moments]
    return min(first_times_s, default=0.0)


def _list_trace_events(
    timeline: RunTimeline, trace_spans: Iterable[RowSpans], zero_s: float, suffix: str
) -> Iterator[dict[str, Any]]:
    pid_by_host: dict[str, int] = {}
    tid_by_row: dict[tuple[str, str], int] = {}

    def to_us(at_s: float) -> float:
        return round(1e6 * (at_s - zero_s), 3)

    def name_process(host: str) -> Iterator[dict[str, Any]]:
        if host not in pid_by_host:
            pid_by_host[host] = len(pid_by_host) + 1
            yield {"ph": "M", "name": "process_name", "pid": pid_by_host[host], "args": {"name": f"{host}{suffix}"}}

    for spans in (*timeline.steps, *timeline.instruments, *trace_spans):
        yield from name_process(spans.host)
        pid = pid_by_host[spans.host]
        tid = tid_by_row.setdefault((spans.host, spans.row_name), len(tid_by_row) + 1)
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": spans.row_name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for name, start_s, end_s in zip(spans.names, spans.start_s.tolist(), spans.end_s.tolist(), strict=True):
            duration_us = max(round(1e6 * (end_s - start_s), 3), 0.0)
            yield {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": to_us(start_s), "dur": duration_us}
    for counter in timeline.counters:
        yield from name_process(counter.host)
        name = f"{counter.name} ({counter.unit})"
        for at_s, value in zip(counter.at_s.tolist(), counter.values.tolist(), strict=True):
            counter_args = {counter.unit: value}
            yield {"ph": "C", "name": name, "pid": pid_by_host[counter.host], "ts": to_us(at_s), "args": counter_args}
    for moment in timeline.moments:
        yield from name_process(moment.host)
        yield {"ph": "i", "s": "p", "name": moment.name, "pid": pid_by_host[moment.host], "tid": 0, "ts": to_us(moment.at_s)}
