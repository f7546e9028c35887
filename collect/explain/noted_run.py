"""A run that notes which of its attributes a metric reads. They show from which files and lines a value was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from collect.loading.loaded_run import LoadedRun, Quantity
from shardlab import files, prediction
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.record import Record, Sample, StepRecord
from shardlab.rundir import VALIDATION

# Attribute of a run -> pattern of the files from which the attribute is read, in the run folder. A metric that reads none of
# these attributes, for example because it needs only the source code of the strategy, has no files.
FILES = {
    "run": "run.json",
    "result": "result.json",
    "step_records": "steps/rank-*.jsonl",
    "sample_records": "samples/*.jsonl",
    "validation": VALIDATION,
    "hosts": "env/*.json",
    "events": "events*.jsonl",
    "clocks": "events*.jsonl",
    "backend": "events*.jsonl",
    "paused": "events*.jsonl",
    "memory": "memory/rank-00000.json",
    "traces": "trace/*",
    "predicted": prediction.path_in(Path()).name,
}
_NOTES = "_notes"


class ReadFile(msgspec.Struct, frozen=True):
    """A file from which the value of a metric was computed."""

    file: str  # path of the file, relative to the workspace
    lines: str | None = None  # numbers of the lines that were used, from 1, such as `3-12, 14`; null: the file has no records


class Notes(msgspec.Struct):
    """The attributes of a run that a metric read."""

    direct: set[str] = msgspec.field(default_factory=set)  # attributes that the metric itself read
    every: set[str] = msgspec.field(default_factory=set)  # `direct`, and the attributes from which those are computed
    depth: int = 0  # nesting: how many attributes are being computed now, each for the one before


class NotedRun(LoadedRun, dict=True):
    """A run that notes the names of the attributes that are read while `of_run` computes a metric."""

    def __getattribute__(self, name: str) -> Any:
        notes = None if name.startswith("_") else super().__getattribute__("__dict__").get(_NOTES)
        if notes is None:
            return super().__getattribute__(name)
        notes.every.add(name)
        if not notes.depth:
            notes.direct.add(name)
        notes.depth += 1
        try:
            return super().__getattribute__(name)
        finally:
            notes.depth -= 1


def of_run(function: Callable[[LoadedRun], Quantity | None], run: LoadedRun) -> tuple[Quantity | None, NotedRun, Notes]:
    """Read the files of a run again and compute a metric. Returns (value, the newly read run, attributes that were read)."""
    noted = NotedRun.read(run.folder)
    noted.verdict, noted.reads_traces = run.verdict, run.reads_traces
    notes = Notes()
    noted.__dict__[_NOTES] = notes
    quantity = function(noted)
    del noted.__dict__[_NOTES]
    return quantity, noted, notes


def read_files(run: NotedRun, notes: Notes) -> list[ReadFile]:
    """The files from which the noted attributes of a run were read, with the lines that were used."""
    found = []
    for pattern in dict.fromkeys(pattern for name, pattern in FILES.items() if name in notes.every):
        for path in sorted(run.folder.path.glob(pattern)):
            short = str(path.relative_to(run.folder.path.parent.parent))
            found.append(ReadFile(short, _lines(path, pattern, run, notes) if path.suffix == ".jsonl" else None))
    return found


def missing(notes: Notes, found: Iterable[ReadFile]) -> list[str]:
    """The patterns of the files that the metric reads and that the run does not have."""
    there = [Path(file.file) for file in found]
    patterns = dict.fromkeys(pattern for name, pattern in FILES.items() if name in notes.every)
    return [pattern for pattern in patterns if not any(path.match(f"runs/*/{pattern}") for path in there)]


def _lines(path: Path, pattern: str, run: NotedRun, notes: Notes) -> str | None:
    """The lines of a file that were used: those of timed steps, of samples around the timed window, or else all lines."""
    wanted: Callable[[Any], bool] = lambda _: True  # noqa: E731 - the usual case of three
    kind: type[Record] | None = None
    if pattern == FILES["step_records"]:
        kind = StepRecord
        if not notes.direct & {"steps", "recorded", "step_records", "step_frames"}:
            # Other attributes are computed from timed steps only. `undisturbed` has the timed steps that no instrument slowed.
            frame = run.undisturbed if not notes.direct & {"timed", "world", "window"} else run.timed
            steps = set(frame["step"].to_list())
            wanted = lambda record: not record.warmup and record.step in steps  # noqa: E731
    elif pattern == FILES["sample_records"]:
        kind = Sample
        if (window := run.window) is not None:
            moments = sorted(sample.wall_s for _, sample in _records(path, Sample))
            first = max((at for at in moments if at <= window[0]), default=window[0])
            last = min((at for at in moments if at >= window[1]), default=window[1])
            wanted = lambda sample: first <= sample.wall_s <= last  # noqa: E731
    if kind is None:
        return spans(range(1, files.read(path).count(b"\n") + 1))
    return spans(number for number, record in _records(path, kind) if wanted(record))


def _records(path: Path, kind: type[Any]) -> list[tuple[int, Any]]:
    """(number of the line, record) of each line of a file that can be read."""
    found = []
    for number, line in enumerate(files.read(path).split(b"\n"), 1):
        try:
            found.append((number, decoder(kind).decode(line)))
        except DECODE_FAULTS:
            continue
    return found


def spans(numbers: Iterable[int]) -> str | None:
    """Numbers in increasing order as text, such as `3-12, 14`; None if `numbers` is empty."""
    ordered: Sequence[int] = list(numbers)
    if not ordered:
        return None
    breaks = [place for place, (one, other) in enumerate(pairwise(ordered), 1) if other != one + 1]
    edges = zip([0, *breaks], [*breaks, len(ordered)], strict=True)
    return ", ".join(f"{ordered[start]}-{ordered[end - 1]}" if end - start > 1 else str(ordered[start]) for start, end in edges)
