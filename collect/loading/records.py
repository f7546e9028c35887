"""Reads the files of one run, each file once, and notes damaged files.

This module does not need the extra `report`, because `collect fetch` uses the module and must work without this extra.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Literal, Self, TypeVar

import msgspec

from collect.loading import sample_cache
from collect.loading.sample_cache import CachedSamples, SampleLines
from shardlab import run_guard
from shardlab.errors import InputError, ShardlabError, WorkspaceError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.files.files import NotRegular
from shardlab.hardware.host import Host
from shardlab.record_types import ClockOffset
from shardlab.runs import suspension
from shardlab.runs.record import (
    CLOCK_EVENT,
    SAMPLER_ENDED,
    Event,
    Record,
    RecordLines,
    Result,
    Sample,
    StepRecord,
    ValidationRecord,
    decode_records,
    find_damaged_line,
    read_records,
)
from shardlab.runs.run import Run
from shardlab.runs.rundir import VALIDATION_FILE, RunDir, judge_records, was_rehearsal
from shardlab.runs.state import JudgedState
from shardlab.runs.suspension import SuspendedSpan

READ_SUBFOLDERS = ("env", "memory", "samples", "steps", "trace")  # the subfolders of a run folder that are read
NO_FOLDER_STATE = JudgedState("planned", "no run folder yet")
_RANK_FILE = re.compile(r"steps/rank-(\d{5,})\.jsonl")
_HOST_FILE = re.compile(r"samples/([^/]+)\.jsonl")
_EVENT_FILE = re.compile(r"events\.(.*\.)?jsonl")

# What is done with the files of samples. open: they are only opened, so their damage and the time of their last sample are not
# known. verify: as read, and cached samples are compared with the lines by their SHA-256 (`sample_cache`).
Telemetry = Literal["open", "read", "verify"]
R = TypeVar("R", bound=Record)


class Damage(msgspec.Struct):
    """The parts of a run folder that could not be read. Paths are relative to the run folder."""

    truncated: list[str] = []
    """Files whose last line is incomplete."""
    corrupt: dict[str, int] = {}
    """Path of a file -> number of its lines that cannot be read."""
    irregular_entries: dict[str, str] = {}
    """Name of an entry that is no regular file or folder -> its kind, such as "a symlink"."""

    def note_damaged_lines(self, file_name: str, record_lines: RecordLines[R]) -> list[R]:
        """Note the damaged lines of a file or of a part of it, and return the records that could be read."""
        if record_lines.is_truncated:
            self.truncated.append(file_name)
        if record_lines.corrupt:
            self.corrupt[file_name] = self.corrupt.get(file_name, 0) + record_lines.corrupt
        return record_lines.records

    @property
    def corrupt_line_count(self) -> int:
        """The number of corrupt lines in all files of the run."""
        return sum(self.corrupt.values())

    def __bool__(self) -> bool:
        return bool(self.truncated or self.corrupt or self.irregular_entries)

    def describe(self) -> str:
        """The damage in words: one clause per damaged file."""
        file_clauses = [f"{name}: the last line is incomplete" for name in self.truncated]
        file_clauses += [f"{name}: {count} corrupt line{'s' * (count != 1)}" for name, count in self.corrupt.items()]
        file_clauses += [f"{name}: {entry_kind}, which was not read" for name, entry_kind in self.irregular_entries.items()]
        return "; ".join(file_clauses)


class RunRecords(msgspec.Struct):
    """The records in a run folder. `collect.loading.loaded_run` adds the values that are computed from these records."""

    needs_frames: ClassVar[bool] = False
    """Whether `_add_cached_samples` gets the frames of samples."""
    folder: RunDir
    verdict: JudgedState = NO_FOLDER_STATE
    run: Run | None = None
    """run.json; None if the file is missing or damaged, then `verdict` says why."""
    result: Result | None = None
    """result.json; None if the file is missing or damaged, then `verdict` says why."""
    step_records: dict[int, list[StepRecord]] = {}
    """Rank -> its step records."""
    validation: list[ValidationRecord] = []
    events: list[Event] = []
    """The events of all writers, ordered by time."""
    hosts: list[Host] = []
    """The descriptions of hosts that could be read."""
    damage: Damage = msgspec.field(default_factory=Damage)
    profiled: bool = False
    """Whether the run folder has a subfolder `trace`."""
    was_suspended: bool = False
    """Whether the run was suspended between its first and its last timed step (`_exclude_suspensions`)."""
    unreadable: str = ""
    """Why the state of the run is unknown: run.json, result.json or an event cannot be read."""
    last_record_s: float = 0.0
    """Time of the last record, in seconds since the epoch by the nodes' clocks; 0: no record."""
    sampler_ends: dict[str, int] = {}
    """Host -> how often its sampler ended while the run was still going on."""
    clock_offsets: dict[str, dict[str, ClockOffset]] = {}
    """Host -> `start` or `end` of the run -> offset from the host of rank 0."""
    backend: str = ""
    """Backend of the ranks' process group, such as gloo; '' if the ranks never formed a process group."""
    was_requeued: bool = False
    """Whether the run ended with a request of its supervisor to be started again (event `requeued`)."""

    @classmethod
    def read(cls, run_dir: RunDir, telemetry: Telemetry = "read") -> Self:
        """Read a run folder and determine the state of the run. A damaged file raises no error; it is noted in `damage`."""
        records = cls(run_dir)
        try:
            entry_names = sorted(os.listdir(run_dir.path))  # noqa: PTH208 - only names are needed; making a Path for each entry takes most of the time
        except (FileNotFoundError, NotADirectoryError):
            return records
        except OSError as error:
            records._note_unreadable(str(WorkspaceError.from_os_error(error, "read")))
        else:
            if isinstance(fault := run_guard.run_guarded(lambda: records._read_files(entry_names, telemetry)), ShardlabError):
                records._note_unreadable(str(fault))
        if records.unreadable:
            records.verdict = JudgedState("unknown", records.unreadable)
        return records

    @property
    def run_id(self) -> str:
        """The name of the run folder."""
        return self.folder.run_id

    @property
    def is_rehearsal(self) -> bool:
        """Whether the run is a rehearsal, by its records. False if run.json could not be read."""
        return self.run is not None and was_rehearsal(self.run, self.result, self.events)

    @property
    def record_count(self) -> int:
        """The number of step records in memory."""
        return sum(map(len, self.step_records.values()))

    def _note_unreadable(self, unreadable_reason: str) -> None:
        """Note the reason why the state of the run is unknown. If there are several reasons, the first reason is kept."""
        self.unreadable = self.unreadable or unreadable_reason

    def _read_files(self, entry_names: Sequence[str], telemetry: Telemetry) -> None:
        """Read all files of the run. entry_names: the sorted names of the entries of the run folder."""
        names_by_subfolder: dict[str, list[str]] = {}
        for subfolder in filter(entry_names.__contains__, READ_SUBFOLDERS):
            try:
                if (subfolder_names := self._list_subfolder(subfolder)) is not None:
                    names_by_subfolder[subfolder] = subfolder_names
            except OSError as error:
                self._note_unreadable(str(WorkspaceError.from_os_error(error, "read")))
        self.profiled = "trace" in names_by_subfolder
        for name in names_by_subfolder.get("steps", ()):
            if match := _RANK_FILE.fullmatch(name):
                self.step_records[int(match[1])] = self._read_records(name, StepRecord)
        host_by_file = {
            name: match[1] for name in names_by_subfolder.get("samples", ()) if (match := _HOST_FILE.fullmatch(name))
        }
        for name, host in host_by_file.items():
            self._read_samples(name, host, telemetry)
        if VALIDATION_FILE in entry_names:
            self.validation = self._read_records(VALIDATION_FILE, ValidationRecord)
        events = [event for name in entry_names if _EVENT_FILE.fullmatch(name) for event in self._read_records(name, Event)]
        self.events = events = sorted(events, key=lambda event: event.wall_s)
        for name in filter(_EVENT_FILE.fullmatch, self.damage.corrupt):
            if (damaged_line := find_damaged_line(f"{self.folder.path}/{name}", Event)) is not None:
                self._note_unreadable(
                    f"{self.folder.path}/{name}:{damaged_line[0]}: is not an event of this version: {damaged_line[1]}."
                )
        try:
            self.run = self.folder.read_run()
            self.result = self.folder.read_result()
            self.verdict = judge_records(self.run, self.result, self.events, self.step_records)
        except (InputError, WorkspaceError) as error:
            self._note_unreadable(str(error))
        self.hosts = [
            host for name in names_by_subfolder.get("env", ()) if (host := load_host(f"{self.folder.path}/{name}")) is not None
        ]
        backend_names = [
            backend for event in events if event.event == "met" and isinstance(backend := event.data.get("backend"), str)
        ]
        self.backend = backend_names[-1] if backend_names else ""
        end_events = (event for event in events if event.event in ("exited", "requeued", "cancelled"))
        last_end_event = max(end_events, key=lambda event: event.wall_s, default=None)
        self.was_requeued = last_end_event is not None and last_end_event.event == "requeued"
        self.sampler_ends = dict(Counter(event.host for event in events if event.event == SAMPLER_ENDED))
        self.clock_offsets = _read_clock_offsets(events)
        record_times_s = [self.last_record_s, *(event.wall_s for event in events)]
        record_times_s += [steps[-1].wall_s for steps in self.step_records.values() if steps]
        self.last_record_s = max(record_times_s)
        self._exclude_suspensions(suspension.read_suspensions(events))

    def _read_samples(self, file_name: str, host: str, telemetry: Telemetry) -> None:
        """Read a file of samples. file_name: its path relative to the run folder. host: the name of the host in this path."""
        last_sample_s, first_unread_byte = 0.0, 0
        try:
            with files.as_workspace_error("read"), SampleLines(f"{self.folder.path}/{file_name}") as sample_lines:
                if telemetry == "open":
                    return
                must_verify, needs_frames = telemetry == "verify", self.needs_frames
                cached_samples = sample_cache.read_cached_samples(
                    sample_lines, needs_frames=needs_frames, must_verify=must_verify
                )
                if cached_samples is not None:
                    last_sample_s, first_unread_byte = cached_samples.header.last_wall_s, cached_samples.header.end
                    self.damage.note_damaged_lines(file_name, RecordLines[Sample]([], corrupt=cached_samples.header.corrupt))
                    self._add_cached_samples(cached_samples)
                for lines_block in sample_lines.read_blocks(first_unread_byte):
                    samples = self.damage.note_damaged_lines(file_name, decode_records(lines_block, Sample))
                    last_sample_s = samples[-1].wall_s if samples else last_sample_s
                    self._add_samples(host, samples)
        except WorkspaceError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                self._note_unread(file_name, error)
        self.last_record_s = max(self.last_record_s, last_sample_s)

    def _add_samples(self, host: str, new_samples: list[Sample]) -> None:
        """Process samples of the file of a host. This class drops them, because those of a long run need gigabytes."""

    def _add_cached_samples(self, cached_samples: CachedSamples) -> None:
        """Process the cached samples of one file, which come before its other samples."""

    def _read_records(self, file_name: str, record_type: type[R]) -> list[R]:
        """The records that can be read from a file. Damaged lines, and a file that is not regular, are noted in `damage`."""
        try:
            return self.damage.note_damaged_lines(file_name, read_records(f"{self.folder.path}/{file_name}", record_type))
        except WorkspaceError as error:
            self._note_unread(file_name, error)
            return []

    def _note_unread(self, entry_name: str, error: WorkspaceError) -> None:
        """Note a file that could not be read, or is not a regular file."""
        if isinstance(error.__cause__, NotRegular):
            self.damage.irregular_entries[entry_name] = error.__cause__.kind
        if not isinstance(error.__cause__, NotRegular) or _EVENT_FILE.fullmatch(entry_name):
            self._note_unreadable(str(error))

    def _list_subfolder(self, subfolder: str) -> list[str] | None:
        """The sorted paths of the entries of a subfolder, relative to the run folder; None if there is no such folder.

        An entry of this name that is no folder is noted in `damage`. Raises OSError if the subfolder cannot be read."""
        subfolder_path = f"{self.folder.path}/{subfolder}"
        try:
            descriptor = os.open(subfolder_path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError:
            self.damage.irregular_entries[subfolder] = files.describe_file_kind(os.lstat(subfolder_path).st_mode)
            return None
        except FileNotFoundError:
            return None
        try:
            return [f"{subfolder}/{entry_name}" for entry_name in sorted(os.listdir(descriptor))]  # noqa: PTH208 - pathlib cannot list a descriptor
        except OSError as error:
            error.filename = subfolder_path  # so that the error message names the path and not the number of the descriptor
            raise
        finally:
            os.close(descriptor)

    def _exclude_suspensions(self, suspensions: Sequence[SuspendedSpan]) -> None:
        """If the run was suspended during its timed steps, mark each step that overlaps a suspension as `watched`, and remove
        the times in the result, so that no metric uses a time that includes a suspension."""
        timed_records = [record for records in self.step_records.values() for record in records if not record.warmup]
        if not suspensions or not timed_records:
            return
        if not suspension.overlaps_suspension(
            min(map(suspension.find_step_start_s, timed_records)), max(record.wall_s for record in timed_records), suspensions
        ):
            return
        self.was_suspended = True
        self.step_records = {
            rank: list(suspension.mark_suspended(rank_records, suspensions)) for rank, rank_records in self.step_records.items()
        }
        removed_values: dict[str, None] = dict.fromkeys(("throughput_per_s", "step_time_ms", "train_time_s", "epoch_time_s"))
        self.result = msgspec.structs.replace(self.result, **removed_values) if self.result else None


def _read_clock_offsets(events: Sequence[Event]) -> dict[str, dict[str, ClockOffset]]:
    offsets_by_host: dict[str, dict[str, ClockOffset]] = {}
    for event in events:
        if event.event == CLOCK_EVENT and (side_of_run := event.data.get("when")) in ("start", "end"):
            with contextlib.suppress(msgspec.ValidationError):
                offsets_by_host.setdefault(event.host, {})[side_of_run] = msgspec.convert(event.data, ClockOffset)
    return offsets_by_host


def load_host(path: str) -> Host | None:
    """The host in a file of the folder `env`; None if the file is damaged or is not a JSON file."""
    try:
        return _decode_host(files.read(path)) if path.endswith(".json") else None
    except (OSError, *DECODE_FAULTS):
        return None


@lru_cache(maxsize=1024)
def _decode_host(host_json: bytes) -> Host:
    """Decode the description of a host. It is cached, because most runs contain the same description."""
    return get_decoder(Host).decode(host_json)
