"""The files behind a value of a run, with the lines of records, the keys or the events in them that count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from collect.explain import trace_events
from collect.explain.read_file import ReadEvents, ReadFile
from collect.loading.loaded_run import LoadedRun
from collect.metric import Reads
from collect.traces import run_traces
from shardlab.files import files, json_file
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.runs.record import GpuSample, Sample, StepRecord
from shardlab.runs.rundir import VALIDATION_FILE

STEPS_PATTERN, SAMPLES_PATTERN, TRACES_PATTERN = "steps/rank-*.jsonl", "samples/*.jsonl", "trace/rank-*.json.gz"
# Keys of run.json and result.json that every metric of steps, of samples, of traces, or of the prediction reads.
KEYS_FOR_STEPS = ("cell.command", "cell.dp", "cell.gpus", "cell.instruments.lost_worker", "imported")
KEYS_FOR_SAMPLES = ("resumed_from_step",)
KEYS_FOR_TRACES = ("gpus",)
KEYS_FOR_PREDICTION = ("cell.instruments.lost_worker", "cell.instruments.straggler")


def list_read_parts(reads: Reads) -> dict[str, Any]:
    """Pattern of files in the folder of a run -> what a metric reads of these files: keys, kinds of events, or which records.

    Patterns of files that the metric does not read have a false value.
    """
    step_kind = reads.steps or ("timed" if reads.samples == "window" else None)
    event_kinds = reads.breakdown or reads.trace
    run_keys = (*reads.run, *(KEYS_FOR_STEPS if step_kind else ()), *(KEYS_FOR_PREDICTION if reads.prediction else ()))
    return {
        "run.json": run_keys,
        "result.json": (*reads.result, *(KEYS_FOR_SAMPLES if reads.samples else ()), *(KEYS_FOR_TRACES if event_kinds else ())),
        STEPS_PATTERN: step_kind,
        SAMPLES_PATTERN: reads.samples,
        VALIDATION_FILE: reads.validation,
        "env/*.json": reads.hosts,
        "events*.jsonl": reads.events,
        TRACES_PATTERN: event_kinds,
        "prediction.json": reads.prediction,
    }


def read_files(run: LoadedRun, reads: Reads) -> list[ReadFile]:
    """The files of a run that a metric reads. A JSON document is left out if none of the keys is in it."""
    files_read = []
    for pattern, declared_parts in list_read_parts(reads).items():
        paths = sorted(run.folder.path.glob(pattern)) if declared_parts else []
        if pattern == TRACES_PATTERN:
            usable_names = {file_figures.path for file_figures in run.traces.files if file_figures.is_usable}
            paths = [path for path in run_traces.select_regular_files(paths) if path.name in usable_names]
        for path in paths:
            relative_path = str(path.relative_to(run.folder.path.parent.parent))
            if path.suffix == ".jsonl":
                files_read.append(ReadFile(relative_path, lines=_find_counted_lines(path, pattern, run, declared_parts)))
            elif pattern == TRACES_PATTERN:
                files_read.append(ReadFile(relative_path, events=_read_trace_events(path, run, reads)))
            elif known_keys := [key for key, value in _read_keys(path, declared_parts) if value is not None]:
                files_read.append(ReadFile(relative_path, keys=known_keys))
    return files_read


def describe_possible_files(metric: str) -> str:
    """A sentence about the files from which a metric may come that does not declare what it reads."""
    return f"{metric} does not declare what it reads, so its values may come from any of {', '.join(list_read_parts(Reads()))}."


def list_missing_patterns(run: LoadedRun, reads: Reads) -> list[str]:
    """The patterns of the files that the metric reads and that the run does not have."""
    return [pattern for pattern, parts in list_read_parts(reads).items() if parts and not any(run.folder.path.glob(pattern))]


def describe_absent_keys(run: LoadedRun, reads: Reads) -> list[str]:
    """For each JSON document that lacks keys that the metric reads, a clause such as `result.json has no flops_per_unit`."""
    clauses = []
    for pattern in ("env/*.json", "prediction.json", "result.json", "run.json"):
        declared_keys = set(list_read_parts(reads)[pattern]) - {*KEYS_FOR_STEPS, *KEYS_FOR_SAMPLES, *KEYS_FOR_PREDICTION}
        for path in sorted(run.folder.path.glob(pattern)):
            if absent_keys := [key for key, value in _read_keys(path, declared_keys) if value is None]:
                clauses.append(f"{path.relative_to(run.folder.path)} has no {', no '.join(absent_keys)}")
    return clauses


def _read_keys(path: Path, declared_keys: Iterable[str]) -> list[tuple[str, Any]]:
    """The places of declared keys in a JSON document, such as `gpus[0].name`, with their values; None: absent or null."""
    document = json_file.read_json_if_valid(path, object)
    return [place_and_value for key in sorted(set(declared_keys)) for place_and_value in _list_values(document, key.split("."))]


def _list_values(document: Any, keys: Sequence[str], outer_place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the place and the value of a key below `document`: in each entry of a list, below each key but the last.

    outer_place: the place of the document itself.
    """
    if not keys:
        yield outer_place, document
    elif isinstance(document, list):
        for entry_index, list_entry in enumerate(document):
            yield from _list_values(list_entry, keys, f"{outer_place}[{entry_index}]")
    else:
        value = document.get(keys[0]) if isinstance(document, dict) else None
        yield from _list_values(value, keys[1:], f"{outer_place}.{keys[0]}" if outer_place else keys[0])


def _read_trace_events(path: Path, run: LoadedRun, reads: Reads) -> list[ReadEvents]:
    """The events of a trace that count. Empty if HolisticTraceAnalysis computed the figures: it chooses events by rules of its
    own."""
    if reads.breakdown and any(breakdown.like_hta for breakdown in run.breakdowns):
        return []
    return trace_events.read_events(path, {*reads.breakdown, *reads.trace})


def _find_counted_lines(path: Path, pattern: str, run: LoadedRun, declared_parts: Any) -> str | None:
    """The lines of a record file that count. declared_parts: which steps or samples the metric reads; of other files all lines
    count."""
    if pattern == STEPS_PATTERN:
        counted_steps = run.undisturbed_steps if declared_parts == "undisturbed" else run.timed_steps
        steps = None if declared_parts == "all" else set(counted_steps["step"].to_list())
        is_counted: Callable[[StepRecord], bool] = lambda record: steps is None or (not record.warmup and record.step in steps)  # noqa: E731
        return format_line_numbers(number for number, record in _read_numbered_records(path, StepRecord) if is_counted(record))
    if pattern == SAMPLES_PATTERN:
        records = _read_numbered_records(path, Sample)
        return format_line_numbers(
            _find_lines_in_window(records, run) if declared_parts == "window" else _find_lines_before_steps(records, run)
        )
    return format_line_numbers(range(1, files.read(path, files.MOST_RECORDS).count(b"\n") + 1))


def _find_lines_in_window(numbered_samples: Sequence[tuple[int, Sample]], run: LoadedRun) -> list[int]:
    """The lines of the samples in the timed window, and of the nearest samples before and after it, between which counters are
    interpolated. All lines if there is no timed window."""
    if (timed_window := run.timed_window) is None:
        return [line_number for line_number, _ in numbered_samples]
    sample_times_s = sorted(sample.wall_s for _, sample in numbered_samples)
    first_s = max((time_s for time_s in sample_times_s if time_s <= timed_window[0]), default=timed_window[0])
    last_s = min((time_s for time_s in sample_times_s if time_s >= timed_window[1]), default=timed_window[1])
    return [line_number for line_number, sample in numbered_samples if first_s <= sample.wall_s <= last_s]


def _find_lines_before_steps(numbered_samples: Sequence[tuple[int, Sample]], run: LoadedRun) -> list[int]:
    """The lines of the samples before the first step in which no process has used a GPU yet, as `energy.measure_idle_power`
    chooses them."""
    first_step_s = min(run.steps["wall_s"].to_list(), default=0.0)
    busy_uuids: set[str] = set()
    line_numbers = []
    for line_number, sample in sorted(numbered_samples, key=lambda numbered_sample: numbered_sample[1].wall_s):
        idle_gpus = [gpu for gpu in sample.gpus or () if _has_power(gpu) and gpu.uuid not in busy_uuids]
        busy_uuids |= {gpu.uuid for gpu in idle_gpus if gpu.processes}
        if sample.wall_s < first_step_s and any(not gpu.processes for gpu in idle_gpus):
            line_numbers.append(line_number)
    return sorted(line_numbers)


def _has_power(gpu: GpuSample) -> bool:
    return gpu.power_w is not None and gpu.processes is not None


def _read_numbered_records(path: Path, record_type: type[Any]) -> list[tuple[int, Any]]:
    """(number of the line, record) of each line of a file that can be read."""
    numbered_records = []
    for line_number, line in enumerate(files.read(path, files.MOST_RECORDS).split(b"\n"), 1):
        try:
            numbered_records.append((line_number, get_decoder(record_type).decode(line)))
        except DECODE_FAULTS:
            continue
    return numbered_records


def format_line_numbers(line_numbers: Iterable[int]) -> str | None:
    """Numbers in increasing order as text, such as `3-12, 14`; None if there are none."""
    ordered_numbers: Sequence[int] = list(line_numbers)
    if not ordered_numbers:
        return None
    break_indexes = [index for index, (before, after) in enumerate(pairwise(ordered_numbers), 1) if after != before + 1]
    index_ranges = zip([0, *break_indexes], [*break_indexes, len(ordered_numbers)], strict=True)
    number_spans = [(ordered_numbers[start], ordered_numbers[end - 1]) for start, end in index_ranges]
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in number_spans)
