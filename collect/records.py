"""The files of one run, each read once, with what could not be read of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec

from shardlab import files, pauses
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import NotRegular
from shardlab.host import Host
from shardlab.pauses import Pause
from shardlab.record import Event, Lines, Record, Result, Sample, StepRecord, ValidationRecord, damaged_line, read_lines
from shardlab.run import Run
from shardlab.rundir import VALIDATION, RunDir, judged
from shardlab.state import Verdict

FOLDERS = ("env", "memory", "samples", "steps", "trace")  # those that are read
NO_FOLDER = Verdict("planned", "no run folder yet")
_RANK = re.compile(r"steps/rank-(\d{5,})\.jsonl")
_HOST = re.compile(r"samples/([^/]+)\.jsonl")
_EVENTS = re.compile(r"events\.(.*\.)?jsonl")

R = TypeVar("R", bound=Record)


class Damage(msgspec.Struct):
    """What could not be read. Paths are the run's.

    truncated: files whose last line is incomplete. corrupt: the number of corrupt lines of a file. not_followed: maps the name
    of an entry that is not a regular file or folder to its kind, such as "a symlink"; such entries are not read.
    """

    truncated: list[str] = []
    corrupt: dict[str, int] = {}
    not_followed: dict[str, str] = {}

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
        return bool(self.truncated or self.corrupt or self.not_followed)

    def says(self) -> str:
        """One clause per damaged file."""
        parts = [f"{name}: the last line is incomplete" for name in self.truncated]
        parts += [f"{name}: {count} corrupt line{'s' * (count != 1)}" for name, count in self.corrupt.items()]
        parts += [f"{name}: {kind}, which was not read" for name, kind in self.not_followed.items()]
        return "; ".join(parts)


class Records(msgspec.Struct):
    """run, result: None if the file is missing or either is damaged, then `verdict` says why. steps: by rank; samples: by the
    host that the file is named after; hosts: the descriptions of hosts that could be read. unreadable: why the run is set aside
    (its state is not known, because run.json, result.json or an event cannot be read, or a file cannot be opened), or ''."""

    verdict: Verdict
    run: Run | None
    result: Result | None
    steps: dict[int, list[StepRecord]]
    samples: dict[str, list[Sample]]
    validation: list[ValidationRecord]
    hosts: list[Host]
    damage: Damage
    profiled: bool = False  # whether there is a folder for traces
    paused: bool = False  # it stood still: steps that hold that are set aside, and the result has no times that do
    unreadable: str = ""
    waits: bool = False  # its supervisor asked for another start after it ended, so that it will go on

    @property
    def count(self) -> int:
        """How many step records and samples there are."""
        return sum(map(len, self.steps.values())) + sum(map(len, self.samples.values()))


def read(folder: RunDir) -> Records:
    """All records of a run, judged."""
    damage, unreadable = Damage(), list[str]()
    try:
        top = sorted(os.listdir(folder.path))  # noqa: PTH208 - names; an object for each takes most of the time
    except (FileNotFoundError, NotADirectoryError):
        return Records(NO_FOLDER, None, None, {}, {}, [], [], damage)
    except OSError as error:
        why = str(WorkspaceError.from_os_error(error, "read"))
        return Records(Verdict("unknown", why), None, None, {}, {}, [], [], damage, unreadable=why)
    parts: dict[str, list[str]] = {}
    for name in FOLDERS:
        try:
            if name in top and (names := _names(folder.path, name, damage)) is not None:
                parts[name] = names
        except OSError as error:
            unreadable.append(str(WorkspaceError.from_os_error(error, "read")))

    def inside(name: str) -> list[str]:
        return [f"{name}/{entry}" for entry in parts.get(name, ())]

    def noted(name: str, kind: type[R]) -> list[R]:
        try:
            return damage.note(name, read_lines(f"{folder.path}/{name}", kind))
        except WorkspaceError as error:
            if isinstance(error.__cause__, NotRegular):
                damage.not_followed[name] = error.__cause__.kind
            if not isinstance(error.__cause__, NotRegular) or _EVENTS.fullmatch(name):
                unreadable.append(str(error))
            return []

    steps = {int(match[1]): noted(name, StepRecord) for name in inside("steps") if (match := _RANK.fullmatch(name))}
    samples = {match[1]: noted(name, Sample) for name in inside("samples") if (match := _HOST.fullmatch(name))}
    validation = noted(VALIDATION, ValidationRecord) if VALIDATION in top else []
    events = [event for name in top if _EVENTS.fullmatch(name) for event in noted(name, Event)]
    for name in filter(_EVENTS.fullmatch, damage.corrupt):
        if (line := damaged_line(f"{folder.path}/{name}", Event)) is not None:
            unreadable.append(f"{folder.path}/{name}:{line[0]}: is not an event of this version: {line[1]}.")
    run: Run | None = None
    result: Result | None = None
    try:
        run = folder.read_run()
        result = folder.read_result()
        verdict = judged(run, result, sorted(events, key=lambda event: event.wall_s), steps)
    except (InputError, WorkspaceError) as error:
        unreadable.append(str(error))
    if unreadable:
        verdict = Verdict("unknown", unreadable[0])
    hosts = [host for name in inside("env") if (host := _host(f"{folder.path}/{name}")) is not None]
    found = Records(verdict, run, result, steps, samples, validation, hosts, damage, "trace" in parts)
    found.unreadable = verdict.why if unreadable else ""
    last = max((e for e in events if e.event in ("exited", "requeued", "cancelled")), key=lambda e: e.wall_s, default=None)
    found.waits = last is not None and last.event == "requeued"
    return _without(found, pauses.of(events))


def _without(found: Records, paused: Sequence[Pause]) -> Records:
    """The records, without the times that hold a pause between the start of the first timed step and the end of the last."""
    if not paused:
        return found
    timed = [record for records in found.steps.values() for record in records if not record.warmup]
    if not timed or not pauses.holds(min(map(pauses.began, timed)), max(record.wall_s for record in timed), paused):
        return found
    aside = {rank: list(pauses.set_aside(records, paused)) for rank, records in found.steps.items()}
    timeless: dict[str, None] = dict.fromkeys(("throughput_per_s", "step_time_ms", "train_time_s", "epoch_time_s"))
    result = msgspec.structs.replace(found.result, **timeless) if found.result else None
    return msgspec.structs.replace(found, steps=aside, result=result, paused=True)


def _names(run: Path, name: str, damage: Damage) -> list[str] | None:
    """What is in a folder of a run, by name, or None if it is no folder, which is noted. Raises OSError."""
    try:
        descriptor = os.open(f"{run}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        damage.not_followed[name] = files.kind_of(os.lstat(f"{run}/{name}").st_mode)
        return None
    except FileNotFoundError:
        return None
    try:
        return sorted(os.listdir(descriptor))  # noqa: PTH208 - pathlib lists no descriptor
    except OSError as error:
        error.filename = f"{run}/{name}"  # not the number of the descriptor
        raise
    finally:
        os.close(descriptor)


def _host(path: str) -> Host | None:
    """What a host said it is; a file that is damaged says nothing."""
    try:
        return _decoded(files.read(path)) if path.endswith(".json") else None
    except (OSError, *DECODE_FAULTS):
        return None


@lru_cache(maxsize=1024)
def _decoded(raw: bytes) -> Host:
    """One object for all runs that say the same of a host, as most do."""
    return decoder(Host).decode(raw)
