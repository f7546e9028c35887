"""The run folder: the paths of its files, functions that read these files, and the state of the run according to the files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

from shardlab.errors import InputError, ShardlabError, WorkspaceError
from shardlab.files import files, json_file
from shardlab.matrix.faults import LostWorker
from shardlab.runs import run as run_file
from shardlab.runs import state
from shardlab.runs.record import SCHEMA, Event, LineWriter, RecordLines, Result, StepRecord, find_damaged_line, read_records

VALIDATION_FILE = "validation.jsonl"
WORK_FOLDER = "work"  # what a command of a user writes there stays on the nodes: it may be large


class RunDir:
    """The folder runs/RUN_ID of a workspace. A property or method that is named after a file, such as `log`, gives its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_id(self) -> str:
        """The run id, which is the name of the folder."""
        return self.path.name

    @property
    def run_json(self) -> Path:
        """The file run.json, which describes the run and never changes."""
        return self.path / "run.json"

    @property
    def claim(self) -> Path:
        """The folder that the first process to start the run creates, so that no other process starts the run as well."""
        return self.path / "claim"

    @property
    def result(self) -> Path:
        """The file result.json, which is written after all other files of the run."""
        return self.path / "result.json"

    @property
    def log(self) -> Path:
        """The folder of all logs of the run."""
        return self.path / "log"

    @property
    def work(self) -> Path:
        """The folder in which the command of a user runs: a copy of the user's folder, which the command may change."""
        return self.path / WORK_FOLDER

    @property
    def job_log(self) -> Path:
        """The file log/job.log with the output of the launcher."""
        return self.log / "job.log"

    def events_file(self, writer: str) -> Path:
        """The file of events of one writer, such as `attempt`."""
        return self.path / f"events.{writer}.jsonl"

    def environment_file(self, host: str) -> Path:
        """The file with the properties of a host: shardlab.hardware.host.Host as JSON."""
        return self.path / "env" / f"{host}.json"

    def list_hosts(self) -> list[str]:
        """The names of the hosts that have a file env/HOST.json, which a host writes when the ranks of the run connect."""
        return [name.removesuffix(".json") for name in files.list_names(f"{self.path}/env") if name.endswith(".json")]

    def steps_file(self, rank: int) -> Path:
        """The file with the step records of a rank."""
        return self.path / "steps" / f"rank-{rank:05d}.jsonl"

    def checksums_file(self, rank: int) -> Path:
        """The file with the checksums of the weights of a rank of a command."""
        return self.path / "checksums" / f"rank-{rank:05d}.jsonl"

    @property
    def validation_file(self) -> Path:
        """The file with the records of the validations."""
        return self.path / VALIDATION_FILE

    def samples_file(self, host: str) -> Path:
        """The file with the telemetry samples of a host."""
        return self.path / "samples" / f"{host}.jsonl"

    def list_sampled_hosts(self) -> list[str]:
        """The names of the hosts that have a file of telemetry samples."""
        return [name.removesuffix(".jsonl") for name in files.list_names(f"{self.path}/samples") if name.endswith(".jsonl")]

    def trace_file(self, rank: int) -> Path:
        """The file with the profiler trace of a rank."""
        return self.path / "trace" / f"rank-{rank:05d}.json.gz"

    def memory_file(self, rank: int) -> Path:
        """The file with the memory of a rank by category."""
        return self.path / "memory" / f"rank-{rank:05d}.json"

    def snapshot_file(self, rank: int) -> Path:
        """The file with the snapshot of a rank's CUDA allocator."""
        return self.path / "memory" / f"rank-{rank:05d}.snapshot.json.gz"

    def rank_log(self, rank: int) -> Path:
        """The file with the log of a rank."""
        return self.log / f"rank-{rank:05d}.log"

    def read_run(self) -> run_file.Run:
        """The content of run.json. Raises InputError if the file is damaged, or if it describes another run."""
        run = run_file.read_run(self.run_json)
        if run.run_id != self.run_id:
            raise InputError(f"{self.run_json}: describes the run {run.run_id}, not the run of its folder.")
        return run

    def read_result(self) -> Result | None:
        """The content of result.json, or None if the file does not exist yet. Raises InputError if the file is damaged."""
        return json_file.read_json(self.result, Result, "is not a result of this version: {}.")

    def is_rehearsal(self) -> bool:
        """Whether the run is a rehearsal, by its records. False if they cannot be read."""
        try:
            return was_rehearsal(self.read_run(), self.read_result(), self.read_events())
        except (InputError, WorkspaceError):
            return False

    def write_event(self, writer: str, event_kind: str, *, sync: bool = True, **data: Any) -> None:
        """Append an event to the event file of `writer`. event_kind: such as `submitted`. data: details of the event.

        sync: whether to wait until the event is on the disk. False is enough if the state of the run does not depend on the
        event.
        """
        wall_s = time.time()
        event_record = Event(schema=SCHEMA, event=event_kind, writer=writer, wall_s=wall_s, host=gethostname(), data=data)
        with LineWriter(self.events_file(writer)) as event_writer:
            event_writer.write_record(event_record, sync=sync)

    def read_events(self, *, strict: bool = False) -> list[Event]:
        """The events of all writers, sorted by their times. Damaged lines are left out.

        strict: whether to raise InputError, with the file and the line number, if a line is damaged. The state of the run is
        then unknown.
        """
        all_events: list[Event] = []
        for file_name in files.list_names(self.path):
            if file_name.startswith("events.") and file_name.endswith(".jsonl"):
                event_path = f"{self.path}/{file_name}"
                event_lines = read_records(event_path, Event)
                if strict and event_lines.corrupt and (damaged_line := find_damaged_line(event_path, Event)) is not None:
                    raise InputError(f"{event_path}:{damaged_line[0]}: is not an event of this version: {damaged_line[1]}.")
                all_events += event_lines.records
        return sorted(all_events, key=lambda event: event.wall_s)

    def steps(self, rank: int) -> RecordLines[StepRecord]:
        """The step records of a rank, and how many lines of the file are damaged."""
        return read_records(self.steps_file(rank), StepRecord)

    def count_timed_steps(self, world_size: int, lost_worker_fault: LostWorker | None = None) -> int:
        """The number of timed steps that every rank from 0 to gpus - 1 has recorded, including ranks that were lost.

        lost_worker_fault: the rank that the cell ends on purpose. If it made all steps before its end, it does not count.
        """
        return _count_timed_steps(
            [self.steps(rank).records for rank in range(world_size)], self.read_events(), lost_worker_fault
        )

    def judge(self) -> state.JudgedState:
        """The state of this run according to its files."""
        return self.judge_with_result(self.read_events())[0]

    def has_ended(self) -> bool:
        """Whether this run is in a final state, according to its files. False if the records of the run cannot be read."""
        try:
            return self.judge().state in state.FINAL_STATES
        except ShardlabError:
            return False

    def find_sent_job(self) -> tuple[str, str]:
        """As `state.find_sent_job`, for the last submission of this run."""
        return state.find_sent_job(state.find_last_sending(self.read_events()))

    def judge_at_end(self, exit_data: Mapping[str, Any], run: run_file.Run) -> state.JudgedState:
        """The state that this run will have when its supervisor records its end. exit_data: the data of the event `exited`."""
        wall_s, data = time.time(), dict(exit_data)
        exited_event = Event(schema=SCHEMA, event="exited", writer="attempt", wall_s=wall_s, host=gethostname(), data=data)
        return self.judge_with_result([*self.read_events(), exited_event], run)[0]

    def judge_with_result(
        self, events: Sequence[Event], run: run_file.Run | None = None
    ) -> tuple[state.JudgedState, Result | None]:
        """Returns (the state of this run according to its files, the content of its result.json).

        The second value is None if the run has not ended or has no result.json.

        events: the events of this run. run: the content of run.json, if the caller has already read it.
        The step records are read only if the supervisor of the run did not record at its end that all steps were completed.
        """
        exited_event = next((event for event in reversed(events) if event.event == "exited"), None)
        if exited_event is None:
            return state.judge(events, has_result=False, steps=0, required_steps=None), None
        try:
            run, result = run or self.read_run(), self.read_result()
        except InputError as error:
            return state.JudgedState("unknown", str(error)), None
        required_steps, step_count = _find_required_steps(run, result), exited_event.data.get("steps")
        if required_steps is None or not isinstance(step_count, int) or step_count < required_steps:
            step_count = self.count_timed_steps(run.cell.recording_ranks, run.cell.instruments.lost_worker)
        return state.judge(events, has_result=result is not None, steps=step_count, required_steps=required_steps), result


def was_rehearsal(run: run_file.Run, result: Result | None, events: Sequence[Event]) -> bool:
    """Whether a run is a rehearsal according to records that the caller has already read: to its result if it has one, else to
    the backend of its ranks, else to its plan. Older versions left some results on a CPU without a mark; they name no GPU or,
    still older, have no memory of a GPU's allocator."""
    if result is not None:
        cpu_peak_bytes = result.peak_memory_bytes if result.gpus is None else None
        return result.rehearsal or result.gpus == [] or "allocated" not in (cpu_peak_bytes or {"allocated": 0})
    backends = [event.data["backend"] for event in events if event.event == "met" and "backend" in event.data]
    backend_decides = backends and not run.cell.servers  # with parameter servers, ranks on GPUs use gloo too
    return run_file.is_rehearsal(run.cell, run.cluster, on_cpu=backends[-1] == "gloo" if backend_decides else run.rehearsal)


def judge_records(
    run: run_file.Run, result: Result | None, events: Sequence[Event], steps_by_rank: Mapping[int, Sequence[StepRecord]]
) -> state.JudgedState:
    """The state of a run according to records that the caller has already read.

    run: the content of run.json. result: the content of result.json, or None. steps_by_rank: the step records of each rank, by
    rank.
    """
    lost_worker_fault = run.cell.instruments.lost_worker
    step_count = _count_timed_steps(
        [steps_by_rank.get(rank, ()) for rank in range(run.cell.recording_ranks)], events, lost_worker_fault
    )
    return state.judge(
        events, has_result=result is not None, steps=step_count, required_steps=_find_required_steps(run, result)
    )


def _find_required_steps(run: run_file.Run, result: Result | None) -> int | None:
    """The number of timed steps that the run must have. If the length of the run is given in epochs, only the result contains
    this number; None if there is no result."""
    has_stated_steps = run.cell.steps is not None and run.cell.command is None
    return run.cell.steps if has_stated_steps else (result.steps if result else None)


def _count_timed_steps(
    records_by_rank: Sequence[Sequence[StepRecord]], events: Sequence[Event], lost_worker_fault: LostWorker | None
) -> int:
    """The number of timed steps that every rank that trains has recorded, including ranks that were lost during the run.

    A rank that ended on purpose does not count if it made all steps that were asked of it (asked_to_end).

    records_by_rank: the step records of each rank. If the run resumed from a checkpoint of another cell, the run has no
    records of the steps before the checkpoint; these steps count as well.
    """
    has_resumed = any(event.event == "resumed" for event in events)
    step_numbers_by_rank = [[record.step for record in records if not record.warmup] for records in records_by_rank]
    step_counts = [len(steps) + (min(steps, default=1) - 1 if has_resumed else 0) for steps in step_numbers_by_rank]
    if lost_worker_fault is not None and [*step_counts[lost_worker_fault.rank :], 0][0] >= lost_worker_fault.step - 1:
        del step_counts[lost_worker_fault.rank]
    return min(step_counts, default=0)
