"""The record files of one run, read once, with what could not be read of each."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from shardlab.record import Event, Lines, Sample, StepRecord, ValidationRecord, read_lines
from shardlab.rundir import RunDir

_RANK = re.compile(r"rank-(\d{5,})\.jsonl")


class Damage(msgspec.Struct):
    """What could not be read. truncated: files whose last line is cut; corrupt: bad lines per file. Paths are the run's."""

    truncated: list[str] = []
    corrupt: dict[str, int] = {}

    def note(self, name: str, lines: Lines[Event] | Lines[StepRecord] | Lines[Sample] | Lines[ValidationRecord]) -> None:
        if lines.truncated:
            self.truncated.append(name)
        if lines.corrupt:
            self.corrupt[name] = lines.corrupt

    @property
    def lines(self) -> int:
        """How many corrupt lines there are in all files."""
        return sum(self.corrupt.values())

    def __bool__(self) -> bool:
        return bool(self.truncated or self.corrupt)

    def says(self) -> str:
        """One clause per damaged file."""
        parts = [f"{name}: the last line is cut" for name in self.truncated]
        parts += [f"{name}: {count} corrupt line{'s' * (count != 1)}" for name, count in self.corrupt.items()]
        return "; ".join(parts)


class Records(msgspec.Struct):
    """steps: by rank; samples: by the host that the file is named after."""

    steps: dict[int, list[StepRecord]]
    samples: dict[str, list[Sample]]
    validation: list[ValidationRecord]
    damage: Damage


def read(run: RunDir) -> Records:
    """All records of a run. Raises WorkspaceError where a file is there and cannot be opened."""
    records = Records({}, {}, [], Damage())
    for path in sorted(run.path.glob("steps/rank-*.jsonl")):
        if match := _RANK.fullmatch(path.name):
            steps = read_lines(path, StepRecord)
            records.steps[int(match[1])] = steps.records
            records.damage.note(_inside(run, path), steps)
    for path in sorted(run.path.glob("samples/*.jsonl")):
        samples = read_lines(path, Sample)
        records.samples[path.stem] = samples.records
        records.damage.note(_inside(run, path), samples)
    validation = read_lines(run.validation_file, ValidationRecord)
    records.validation = validation.records
    records.damage.note(_inside(run, run.validation_file), validation)
    for path in sorted(run.path.glob("events.*.jsonl")):
        records.damage.note(_inside(run, path), read_lines(path, Event))
    return records


def _inside(run: RunDir, path: Path) -> str:
    return path.relative_to(run.path).as_posix()
