"""The paths of a run's files, and the state of the run according to these files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

from shardlab import files, state
from shardlab import run as run_file
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import InputError, WorkspaceError
from shardlab.record import SCHEMA, Event, Lines, LineWriter, Result, StepRecord, damaged_line, read_lines

VALIDATION = "validation.jsonl"


class RunDir:
    """The folder runs/RUN_ID."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def claim(self) -> Path:
        return self.path / "claim"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def job_log(self) -> Path:
        return self.log / "job.log"

    def events_file(self, writer: str) -> Path:
        return self.path / f"events.{writer}.jsonl"

    def environment(self, host: str) -> Path:
        return self.path / "env" / f"{host}.json"

    def hosts(self) -> list[str]:
        """The machines that wrote a description of themselves when the ranks of the run connected."""
        return [name.removesuffix(".json") for name in files.names(f"{self.path}/env") if name.endswith(".json")]

    def steps_file(self, rank: int) -> Path:
        return self.path / "steps" / f"rank-{rank:05d}.jsonl"

    @property
    def validation_file(self) -> Path:
        return self.path / VALIDATION

    def samples_file(self, host: str) -> Path:
        return self.path / "samples" / f"{host}.jsonl"

    def trace_file(self, rank: int) -> Path:
        return self.path / "trace" / f"rank-{rank:05d}.json.gz"

    def memory_file(self, rank: int) -> Path:
        return self.path / "memory" / f"rank-{rank:05d}.json"

    def snapshot_file(self, rank: int) -> Path:
        return self.path / "memory" / f"rank-{rank:05d}.snapshot.json.gz"

    def rank_log(self, rank: int) -> Path:
        return self.log / f"rank-{rank:05d}.log"

    def read_run(self) -> run_file.Run:
        return run_file.read(self.run_json)

    def read_result(self) -> Result | None:
        """The result, or None if there is none yet. Raises InputError if the file is damaged."""
        try:
            return decoder(Result).decode(files.read(self.result))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "read") from error
        except DECODE_FAULTS as error:
            raise InputError(f"{self.result}: is not a result of this version: {error}.") from None

    def write_event(self, writer: str, event: str, *, sync: bool = True, **data: Any) -> None:
        """Append an event to the event file of `writer`. sync: False if the state of the run does not depend on it."""
        now = time.time()
        record = Event(schema=SCHEMA, event=event, writer=writer, wall_s=now, host=gethostname(), data=data)
        with LineWriter(self.events_file(writer)) as lines:
            lines.write(record, sync=sync)

    def events(self, *, strict: bool = False) -> list[Event]:
        """The events of all writers in the order of their clocks; damaged lines are left out.

        strict: raise InputError with the file and the line if a line is damaged, because the state of the run is then unknown.
        """
        found: list[Event] = []
        for name in files.names(self.path):
            if name.startswith("events.") and name.endswith(".jsonl"):
                path = f"{self.path}/{name}"
                lines = read_lines(path, Event)
                if strict and lines.corrupt and (damaged := damaged_line(path, Event)) is not None:
                    raise InputError(f"{path}:{damaged[0]}: is not an event of this version: {damaged[1]}.")
                found += lines.records
        return sorted(found, key=lambda event: event.wall_s)

    def steps(self, rank: int) -> Lines[StepRecord]:
        return read_lines(self.steps_file(rank), StepRecord)

    def timed_steps(self, gpus: int) -> int:
        """The timed steps that every rank that trains has recorded, one that was lost included: ranks 0 to gpus - 1."""
        return _timed_steps([self.steps(rank).records for rank in range(gpus)], self.events())

    def judge(self) -> state.Verdict:
        """The state of this run according to its files."""
        return self.told(self.events())[0]

    def told(self, events: Sequence[Event], run: run_file.Run | None = None) -> tuple[state.Verdict, Result | None]:
        """(the state of this run according to its files, its result if it ended). events, run: as read before.

        Its recorded steps are counted only if its supervisor did not count all of them at the end.
        """
        exited = next((event for event in reversed(events) if event.event == "exited"), None)
        if exited is None:
            return state.judge(events, has_result=False, steps=0, steps_asked=None), None
        try:
            run, result = run or self.read_run(), self.read_result()
        except InputError as error:
            return state.Verdict("unknown", str(error)), None
        asked, counted = _asked(run, result), exited.data.get("steps")
        if asked is None or not isinstance(counted, int) or counted < asked:
            counted = self.timed_steps(run.cell.gpus)
        return state.judge(events, has_result=result is not None, steps=counted, steps_asked=asked), result


def judged(
    run: run_file.Run, result: Result | None, events: Sequence[Event], steps: Mapping[int, Sequence[StepRecord]]
) -> state.Verdict:
    """The state of a run according to its records. steps: by rank."""
    recorded = _timed_steps([steps.get(rank, ()) for rank in range(run.cell.gpus)], events)
    return state.judge(events, has_result=result is not None, steps=recorded, steps_asked=_asked(run, result))


def _asked(run: run_file.Run, result: Result | None) -> int | None:
    """The timed steps that were asked for; of epochs only the result says how many they made."""
    return run.cell.steps if run.cell.steps is not None else (result.steps if result else None)


def _timed_steps(ranks: Sequence[Sequence[StepRecord]], events: Sequence[Event]) -> int:
    """The timed steps that every rank that trains has recorded, one that was lost included.

    Steps that a checkpoint of another cell brought along count, and have no records here.
    """
    resumed = any(event.event == "resumed" for event in events)
    timed = [[record.step for record in records if not record.warmup] for records in ranks]
    return min((len(steps) + (min(steps, default=1) - 1 if resumed else 0) for steps in timed), default=0)
