"""The files behind a value of a run, with the lines of records, the keys or the events in them that count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from collect.explain import noted_run, noted_values, trace_events
from collect.explain.noted_run import NotedRun, Notes
from collect.explain.read_file import ReadEvents, ReadFile
from collect.traces import figure_cache, run_traces
from shardlab.files import files, json_file
from shardlab.files.decoders import DECODE_FAULTS, decoder
from shardlab.runs.record import GpuSample, Sample, StepRecord
from shardlab.runs.rundir import VALIDATION

# Attribute of a run -> pattern of the files from which its value comes, in the folder of the run. A metric that reads none of
# these attributes, such as a metric of the code of the cell only, has no files.
FILES = {
    "run": noted_run.RUN,
    "result": noted_run.RESULT,
    "step_records": "steps/rank-*.jsonl",
    "sample_records": "samples/*.jsonl",
    "validation": VALIDATION,
    "hosts": noted_run.ENVIRONMENT.format("*.json"),
    "events": "events*.jsonl",
    "clocks": "events*.jsonl",
    "backend": "events*.jsonl",
    "paused": "events*.jsonl",
    "traces": "trace/rank-*.json.gz",
    "predicted": noted_run.PREDICTION,
}


def read_files(run: NotedRun, notes: Notes) -> list[ReadFile]:
    """The files behind what was read of a run. A JSON document is left out if none of the keys that were read is in it."""
    files_read = []
    for pattern in _list_patterns(notes):
        paths = sorted(run.folder.path.glob(pattern))
        if pattern == FILES["traces"]:
            paths = [path for path in run_traces.select_regular_files(paths) if figure_cache.load_figures(path) is not None]
        for path in paths:
            relative_path = str(path.relative_to(run.folder.path.parent.parent))
            if path.suffix == ".jsonl":
                files_read.append(ReadFile(relative_path, lines=_find_counted_lines(path, pattern, run, notes)))
            elif pattern == FILES["traces"]:
                files_read.append(ReadFile(relative_path, events=_read_trace_events(path, run, notes)))
            elif keys := [noted_values.path_text(key) for key, value in _read_keys(path, run, notes) if value is not None]:
                files_read.append(ReadFile(relative_path, keys=keys))
    return files_read


def missing_patterns(run: NotedRun, notes: Notes) -> list[str]:
    """The patterns of the files that the metric reads and that the run does not have."""
    return [pattern for pattern in _list_patterns(notes) if next(run.folder.path.glob(pattern), None) is None]


def absent_keys(run: NotedRun, notes: Notes) -> list[str]:
    """For each JSON document that lacks keys that the metric read, a clause such as `result.json has no flops_per_unit`."""
    clauses = []
    for file in sorted(notes.keys.keys() - {noted_run.TRACES}):
        keys = [noted_values.path_text(key) for key, value in _read_keys(run.folder.path / file, run, notes) if value is None]
        if keys:
            clauses.append(f"{file} has no {', no '.join(keys)}")
    return clauses


def _list_patterns(notes: Notes) -> list[str]:
    return list(dict.fromkeys(pattern for name, pattern in FILES.items() if name in notes.all_read))


def _read_keys(path: Path, run: NotedRun, notes: Notes) -> list[tuple[noted_values.KeyPath, Any]]:
    """The keys of a JSON document that were read, with their values in the file; None for a key that is absent or null."""
    paths = noted_values.select_innermost(notes.keys.get(str(path.relative_to(run.folder.path)), ()))
    document = json_file.read_json_if_valid(path, object)
    return [(key, noted_values.find_value(document, key)) for key in paths if key]


def _read_trace_events(path: Path, run: NotedRun, notes: Notes) -> list[ReadEvents]:
    """The events of a trace that count. Empty if HolisticTraceAnalysis computed the figures: it chooses events by rules of its
    own."""
    if "breakdowns" in notes.all_read and any(breakdown.like_hta for breakdown in run.breakdowns):
        return []
    return trace_events.read_events(path, {str(key[0]) for key in notes.keys.get(noted_run.TRACES, ()) if key})


def _find_counted_lines(path: Path, pattern: str, run: NotedRun, notes: Notes) -> str | None:
    """The lines of a record file that count: timed steps, the samples that were used, or all lines that can be read."""
    if pattern == FILES["step_records"]:
        steps = None
        if not notes.direct & {"steps", "recorded", "step_records", "step_frames"}:
            # Other attributes than these are computed from the timed steps; `undisturbed` leaves out what an instrument slowed.
            frame = run.undisturbed if not notes.direct & {"timed", "world", "window"} else run.timed
            steps = set(frame["step"].to_list())
        is_counted: Callable[[StepRecord], bool] = lambda record: steps is None or (not record.warmup and record.step in steps)  # noqa: E731
        return spans_text(number for number, record in _read_records(path, StepRecord) if is_counted(record))
    if pattern == FILES["sample_records"]:
        records = _read_records(path, Sample)
        return spans_text(_lines_in_window(records, run) if "window" in notes.all_read else _lines_before_steps(records, run))
    return spans_text(range(1, files.read(path, files.MOST_RECORDS).count(b"\n") + 1))


def _lines_in_window(records: Sequence[tuple[int, Sample]], run: NotedRun) -> list[int]:
    """The lines of the samples in the timed window, and of the nearest samples before and after it, between which counters are
    interpolated. All lines if there is no timed window."""
    if (window := run.window) is None:
        return [number for number, _ in records]
    moments = sorted(sample.wall_s for _, sample in records)
    first = max((moment for moment in moments if moment <= window[0]), default=window[0])
    last = min((moment for moment in moments if moment >= window[1]), default=window[1])
    return [number for number, sample in records if first <= sample.wall_s <= last]


def _lines_before_steps(records: Sequence[tuple[int, Sample]], run: NotedRun) -> list[int]:
    """The lines of the samples before the first step in which no process has used a GPU yet, as `energy.idle_power` chooses
    them."""
    first_step_s = min((step.wall_s for steps in run.step_records.values() for step in steps), default=0.0)
    busy: set[str] = set()
    numbers = []
    for number, sample in sorted(records, key=lambda record: record[1].wall_s):
        idle = [gpu for gpu in sample.gpus or () if _has_power(gpu) and gpu.uuid not in busy]
        busy |= {gpu.uuid for gpu in idle if gpu.processes}
        if sample.wall_s < first_step_s and any(not gpu.processes for gpu in idle):
            numbers.append(number)
    return sorted(numbers)


def _has_power(gpu: GpuSample) -> bool:
    return gpu.power_w is not None and gpu.processes is not None


def _read_records(path: Path, kind: type[Any]) -> list[tuple[int, Any]]:
    """(number of the line, record) of each line of a file that can be read."""
    records = []
    for number, line in enumerate(files.read(path, files.MOST_RECORDS).split(b"\n"), 1):
        try:
            records.append((number, decoder(kind).decode(line)))
        except DECODE_FAULTS:
            continue
    return records


def spans_text(numbers: Iterable[int]) -> str | None:
    """Numbers in increasing order as text, such as `3-12, 14`; None if there are none."""
    ordered: Sequence[int] = list(numbers)
    if not ordered:
        return None
    break_indexes = [index for index, (before, after) in enumerate(pairwise(ordered), 1) if after != before + 1]
    edges = zip([0, *break_indexes], [*break_indexes, len(ordered)], strict=True)
    return ", ".join(f"{ordered[start]}-{ordered[end - 1]}" if end - start > 1 else str(ordered[start]) for start, end in edges)
