"""The files of one run, each read once, with what could not be read of them."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec

from shardlab.errors import InputError
from shardlab.host import Host
from shardlab.record import Event, Lines, Record, Result, Sample, StepRecord, ValidationRecord, read_lines
from shardlab.run import Run
from shardlab.rundir import RunDir, judged
from shardlab.state import Verdict

NO_FOLDER = Verdict("planned", "no run folder yet")
_RANK = re.compile(r"rank-(\d{5,})\.jsonl")

R = TypeVar("R", bound=Record)


class Damage(msgspec.Struct):
    """What could not be read. truncated: files whose last line is cut; corrupt: bad lines per file. Paths are the run's."""

    truncated: list[str] = []
    corrupt: dict[str, int] = {}

    def note(self, name: str, lines: Lines[R]) -> list[R]:
        """The records that could be read."""
        if lines.truncated:
            self.truncated.append(name)
        if lines.corrupt:
            self.corrupt[name] = lines.corrupt
        return lines.records

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
    """run, result: None where there is none or either is damaged, then the verdict says why. steps: by rank; samples: by the
    host that the file is named after; hosts: those that say what they are."""

    verdict: Verdict
    run: Run | None
    result: Result | None
    steps: dict[int, list[StepRecord]]
    samples: dict[str, list[Sample]]
    validation: list[ValidationRecord]
    hosts: list[Host]
    damage: Damage

    @property
    def count(self) -> int:
        """How many step records and samples there are."""
        return sum(map(len, self.steps.values())) + sum(map(len, self.samples.values()))


def read(folder: RunDir) -> Records:
    """All records of a run, judged. Raises WorkspaceError where a file is there and cannot be opened."""
    damage = Damage()
    if not folder.path.is_dir():
        return Records(NO_FOLDER, None, None, {}, {}, [], [], damage)
    names = _names(folder.path)
    steps = {
        int(match[1]): damage.note(f"steps/{path.name}", read_lines(path, StepRecord))
        for path in _files(folder.path / "steps", names)
        if (match := _RANK.fullmatch(path.name))
    }
    samples = {
        path.stem: damage.note(f"samples/{path.name}", read_lines(path, Sample))
        for path in _files(folder.path / "samples", names)
        if path.suffix == ".jsonl"
    }
    validation = [
        record
        for path in [folder.validation_file]
        if path.name in names
        for record in damage.note(path.name, read_lines(path, ValidationRecord))
    ]
    events = [
        event
        for name in names
        if name.startswith("events.") and name.endswith(".jsonl")
        for event in damage.note(name, read_lines(folder.path / name, Event))
    ]
    run: Run | None = None
    result: Result | None = None
    try:
        run = folder.read_run()
        result = folder.read_result()
        verdict = judged(run, result, sorted(events, key=lambda event: event.wall_s), steps)
    except InputError as error:
        verdict = Verdict("unknown", str(error))
    hosts = [host for path in _files(folder.path / "env", names) if (host := _host(path)) is not None]
    return Records(verdict, run, result, steps, samples, validation, hosts, damage)


def _files(folder: Path, names: list[str]) -> list[Path]:
    """The files of a folder in the run's, by name; `names`: what is in the run's."""
    return [folder / name for name in _names(folder)] if folder.name in names else []


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _host(path: Path) -> Host | None:
    """What a host said it is; a file that is damaged says nothing."""
    try:
        return _decoded(path.read_bytes()) if path.suffix == ".json" else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


@lru_cache(maxsize=1024)
def _decoded(raw: bytes) -> Host:
    """One object for all runs that say the same of a host, as most do."""
    return msgspec.json.decode(raw, type=Host)
