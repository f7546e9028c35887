"""Finds the states of all runs of a workspace from their records. Only files that have changed are read again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from collect.watch.run_series import RunSeries
from shardlab.cluster.lease import Lease
from shardlab.errors import ShardlabError
from shardlab.runs import lease_cutoff, suspension
from shardlab.runs.record import Event, Result
from shardlab.runs.run import Run, split_attempt
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL_STATES, STATE_MEANINGS, JudgedState
from shardlab.workspace.workspace import Workspace

# (name, inode, size, change time in ns) of each file that tells the state
FilesSignature = tuple[tuple[str, int, int, int], ...]
SETTLED_STATES = FINAL_STATES | {"unknown"}


class QueuedRun:
    """One run of the workspace with its state, and with its curves while the page shows them."""

    def __init__(self, run_dir: RunDir) -> None:
        self.folder = run_dir
        self.run: Run | None = None  # None if run.json cannot be read
        self.verdict = JudgedState("unknown", "")
        self.result: Result | None = None
        self.events: list[Event] = []
        self.series: RunSeries | None = None  # None if the curves are not needed
        self._signature: FilesSignature | None = None

    @property
    def run_id(self) -> str:
        """The name of the run folder."""
        return self.folder.run_id

    @property
    def last_event_s(self) -> float:
        """The time of the last event of the run, in seconds since the epoch; 0 if the run has no event."""
        return max((event.wall_s for event in self.events), default=0.0)

    @property
    def began_s(self) -> float | None:
        """When the supervisor first started the run, in seconds since the epoch; None if the run has not been started."""
        return min((event.wall_s for event in self.events if event.event == "started"), default=None)

    @property
    def has_failed(self) -> bool:
        """Whether the run ended in a state that its cell does not expect."""
        expected_states = {"completed", *(self.run.cell.expect if self.run is not None else ())}
        return self.verdict.state in FINAL_STATES and self.verdict.state not in expected_states

    @property
    def last_step(self) -> int | None:
        """The number of the last timed step of which the records are known; None if no such step is known."""
        if self.result is not None:
            return self.result.steps
        if self.series is not None and self.series.progress.last_step is not None:
            return self.series.progress.last_step
        exited_steps = next((event.data.get("steps") for event in reversed(self.events) if event.event == "exited"), None)
        return exited_steps if isinstance(exited_steps, int) else None

    @property
    def step_count(self) -> int | None:
        """The number of timed steps that the run will have or had; None if this number is not known."""
        if self.result is not None:
            return self.result.steps
        return self.run.cell.steps if self.run is not None else None

    def judge_under_lease(self, lease: Lease | None) -> JudgedState:
        """The state of the run according to its records and to the lease of its machines."""
        last_sign_s = max(self.last_event_s, self.series.last_record_s if self.series is not None else 0.0)
        return lease_cutoff.judge_by_records(self.verdict, lease, datetime.fromtimestamp(last_sign_s, UTC), datetime.now(UTC))

    def refresh(self) -> None:
        """Determine the state of the run again if one of the files from which the state follows has changed."""
        signature = _read_signature(self.folder)
        if signature == self._signature:
            return
        self._signature = signature
        self.result = None
        try:
            self.run = self.folder.read_run()
            self.events = self.folder.read_events(strict=True)
            self.verdict, self.result = self.folder.judge_with_result(self.events, self.run)
        except ShardlabError as error:
            self.verdict = JudgedState("unknown", str(error))

    def update_series(self) -> None:
        """Read the new records of the run, and add them to its curves."""
        if self.run is None or self.began_s is None:
            return
        suspensions = suspension.read_suspensions(self.events)
        # A new pause may overlap steps that were already read, so all records are read again.
        if self.series is None or self.series.suspensions != suspensions:
            self.series = RunSeries(self.folder, self.run, self.began_s, suspensions)
        self.series.read_new_records()


class Queue:
    """All runs of a workspace. If a repeat of a cell was tried several times, only the last attempt is in the queue."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._runs_by_id: dict[str, QueuedRun] = {}

    def refresh(self) -> list[QueuedRun]:
        """The runs with their present states: first runs that failed, then running runs, then waiting runs, then all other
        runs by their last event."""
        latest_run_by_name: dict[str, str] = {}
        for run_id in self.workspace.list_run_ids():
            run_name, attempt_number = split_attempt(run_id)
            if run_name not in latest_run_by_name or attempt_number > split_attempt(latest_run_by_name[run_name])[1]:
                latest_run_by_name[run_name] = run_id
        self._runs_by_id = {
            run_id: self._runs_by_id.get(run_id) or QueuedRun(RunDir(self.workspace.runs / run_id))
            for run_id in latest_run_by_name.values()
        }
        for run in self._runs_by_id.values():
            run.refresh()
        return sorted(self._runs_by_id.values(), key=_make_queue_sort_key)

    def follow_running_runs(self, runs: Sequence[QueuedRun]) -> list[QueuedRun]:
        """Read the new records of the runs whose curves the page shows, and return these runs.

        They are the running runs or, if no run is running, the run that ran last.
        """
        started_runs = [run for run in runs if run.began_s is not None and run.run is not None]
        running_runs = [run for run in started_runs if run.verdict.state == "running"]
        followed_runs = running_runs or sorted(started_runs, key=lambda run: run.last_event_s)[-1:]
        for run in runs:
            if run in followed_runs:
                run.update_series()
            else:
                run.series = None
        return followed_runs


def estimate_remaining_s(runs: Sequence[QueuedRun]) -> float | None:
    """The time until all runs have ended, in seconds, if the others take as long as those that ended and as many run at a time
    as now. None if no run is running, or if none has ended."""
    durations_s = [
        run.last_event_s - run.began_s for run in runs if run.verdict.state in FINAL_STATES and run.began_s is not None
    ]
    running_count = sum(run.verdict.state == "running" for run in runs)
    waiting_count = sum(run.verdict.state in ("pending", "planned") for run in runs)
    if not durations_s or not running_count:
        return None
    return (
        (waiting_count + running_count / 2) * sum(durations_s) / len(durations_s) / running_count
    )  # running: half, on average


class StateCount(msgspec.Struct, frozen=True):
    """How many runs are in a state."""

    state: str
    runs: int


def count_states(states: Sequence[str]) -> list[StateCount]:
    """The number of runs in each state that occurs. The order is the one in which a run goes through the states."""
    count_by_state = Counter(states)
    return [StateCount(state, count_by_state[state]) for state in STATE_MEANINGS if state in count_by_state]


def _make_queue_sort_key(run: QueuedRun) -> tuple[int, float, str]:
    state = run.verdict.state
    state_rank = ["running", "pending", "planned"].index(state) if state not in SETTLED_STATES else -1 if run.has_failed else 3
    return state_rank, 0.0 if state not in SETTLED_STATES else -run.last_event_s, run.run_id


def _read_signature(run_dir: RunDir) -> FilesSignature:
    file_signatures = []
    try:
        with os.scandir(run_dir.path) as folder_entries:
            for entry in folder_entries:
                if entry.name in ("run.json", "result.json") or entry.name.startswith("events."):
                    file_status = entry.stat(follow_symlinks=False)
                    file_signatures.append((entry.name, file_status.st_ino, file_status.st_size, file_status.st_mtime_ns))
    except OSError:
        return ()
    return tuple(sorted(file_signatures))
