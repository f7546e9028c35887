"""Writes a timeline as a file for ui.perfetto.dev, a program that shows traces, in the trace event format of Chrome.

Each host is shown as a process, and each rank, thread or stream as a row of this process.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from collect.timeline.timeline import RunTimeline, Spans
from shardlab.files import files


def write(path: Path, timeline: RunTimeline, profiled: Iterable[Spans], host_suffix: str = "") -> int:
    """Write the file, compressed if its name ends in .gz. Returns the number of events in the file.

    profiled: the events of traces (`timeline.trace_spans`). host_suffix: follows the name of each host. Times in the file are
    in microseconds since the first moment of the timeline; `otherData.began_s` is this moment in seconds since the epoch.
    Raises WorkspaceError if the file cannot be written.
    """
    zero_s = _first_time_s(timeline)
    count = 0
    with files.as_workspace_error("write"):
        temporary_path = path.with_name(f".{path.name}.unfinished")
        temporary_path.unlink(missing_ok=True)
        with gzip.open(temporary_path, "xt") if path.suffix == ".gz" else temporary_path.open("x") as file:
            metadata = {"run": timeline.run_id, "began_s": zero_s, "uncorrected_hosts": timeline.uncorrected}
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(metadata)}, "traceEvents": [\n')
            for event in _trace_events(timeline, profiled, zero_s, host_suffix):
                file.write(f"{',' if count else ''}{json.dumps(event)}\n")
                count += 1
            file.write("]}\n")
        temporary_path.replace(path)
    return count


def _first_time_s(timeline: RunTimeline) -> float:
    firsts = [float(entry.start_s.min()) for entry in (*timeline.steps, *timeline.instruments) if len(entry.start_s)]
    firsts += [float(entry.at_s.min()) for entry in timeline.counters] + [moment.at_s for moment in timeline.moments]
    return min(firsts, default=0.0)


def _trace_events(timeline: RunTimeline, profiled: Iterable[Spans], zero_s: float, suffix: str) -> Iterator[dict[str, Any]]:
    processes: dict[str, int] = {}
    rows: dict[tuple[str, str], int] = {}

    def us(at_s: float) -> float:
        return round(1e6 * (at_s - zero_s), 3)

    def process(host: str) -> Iterator[dict[str, Any]]:
        if host not in processes:
            processes[host] = len(processes) + 1
            yield {"ph": "M", "name": "process_name", "pid": processes[host], "args": {"name": f"{host}{suffix}"}}

    for spans in (*timeline.steps, *timeline.instruments, *profiled):
        yield from process(spans.host)
        pid = processes[spans.host]
        tid = rows.setdefault((spans.host, spans.row), len(rows) + 1)
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": spans.row}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for name, start_s, end_s in zip(spans.names, spans.start_s.tolist(), spans.end_s.tolist(), strict=True):
            took_us = max(round(1e6 * (end_s - start_s), 3), 0.0)
            yield {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": us(start_s), "dur": took_us}
    for counter in timeline.counters:
        yield from process(counter.host)
        name = f"{counter.name} ({counter.unit})"
        for at_s, value in zip(counter.at_s.tolist(), counter.values.tolist(), strict=True):
            args = {counter.unit: value}
            yield {"ph": "C", "name": name, "pid": processes[counter.host], "ts": us(at_s), "args": args}
    for moment in timeline.moments:
        yield from process(moment.host)
        yield {"ph": "i", "s": "p", "name": moment.name, "pid": processes[moment.host], "tid": 0, "ts": us(moment.at_s)}
