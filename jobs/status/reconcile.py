"""Combines the records in a run's folder with the scheduler's state of the run into one status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from jobs.scheduler import ObservedRun, RunOnDisk, find_scheduler, group_by_scheduler
from jobs.status import retry_budget
from shardlab import run_guard
from shardlab.cluster import slurm_waiting
from shardlab.cluster.lease import Lease
from shardlab.cluster.slurm_cluster import address_cluster
from shardlab.errors import ShardlabError
from shardlab.files import gc_pause
from shardlab.matrix.batch_search import BatchSearch
from shardlab.matrix.retry import Retry
from shardlab.runs import lease_cutoff, recorder_ends, suspension
from shardlab.runs.progress import RunProgress
from shardlab.runs.record import Event, Sample, read_records
from shardlab.runs.run import split_attempt
from shardlab.runs.rundir import RunDir, was_rehearsal
from shardlab.runs.state import FINAL_STATES, JudgedState
from shardlab.workspace import handles, inventory
from shardlab.workspace.workspace import Workspace

STATES_WITH_RETRY = ("pending", "running", "completed")  # states beside which the table says why the run was started again


class Status(msgspec.Struct, kw_only=True):
    """The status of one run, as `jobs status` shows it."""

    id: str
    """The run id."""
    cell: dict[str, Any] | None
    """The cell; None if the records of the run cannot be read."""
    state: str
    """The state of the run."""
    why: str
    """The reason for the state."""
    scheduler: dict[str, str]
    """The name of the scheduler, its number of the run's job, and its own words for the state of the job."""
    step: int | None
    """The number of timed steps that are done."""
    steps: int | None
    """The number of timed steps in all."""
    throughput: float | None
    """Units per second over the timed steps so far, from rank 0; None for a completed run that was suspended."""
    unit: str | None
    """What the throughput counts, such as tokens."""
    eta_s: float | None
    """The estimated time to the end of the training, in seconds."""
    started: datetime | None
    """When the supervisor first started the run."""
    ended: datetime | None
    """When the supervisor saw the ranks end; None if no supervisor saw it."""
    duration_s: float | None
    """Seconds from the start to the end or to now, including waits after a requeue and suspensions."""
    hosts: list[str]
    """The machines on which the run ran."""
    attempt: int | None
    """Number of the attempt, from 1."""
    repeat: int | None
    """Number of the repeat, from 1."""
    rehearsal: bool | None
    resumed_from_step: int | None = None
    """The timed step of the checkpoint from which the run resumed."""
    expected: bool
    """Whether the run completed, or ended in a state that the cell lists in `expect`."""
    held: bool = False
    """Whether the run is pending or planned and starts only after `jobs retry --only held`."""
    leftover: bool = False
    """Whether the run's job is still in the scheduler's queue, although the run has ended."""
    trouble: list[str] = []
    """Clauses about a sampler or a tracker that ended while the run went on."""
    search: BatchSearch | None = None
    """The search of which the run is a try."""
    retried: list[str] = []
    """For each time that the run was started again by itself: the state in which it had ended."""
    retries_allowed: dict[str, int] = {}
    """How often the run may be started again by itself, by the state in which it ends."""
    handle: str = ""
    """The short name of the run, such as c3.2; '' if the matrix as submitted last does not have the run."""

    @property
    def is_unreadable(self) -> bool:
        """Whether the records of the run cannot be read. No command changes such a run; `why` names the file and what to do."""
        return self.cell is None

    @property
    def is_held_in_queue(self) -> bool:
        """Whether the run's job is in the queue and held, so that the job is released instead of submitted."""
        return self.held and self.state == "pending"

    @property
    def is_held_after_launch(self) -> bool:
        """Whether Slurm holds the run's job after a failed start on a node."""
        return self.is_held_in_queue and slurm_waiting.HELD_AFTER_LAUNCH.search(self.scheduler["raw"]) is not None


def read_statuses(workspace: Workspace, run_dirs: Sequence[RunDir], matrix_name: str | None = None) -> list[Status]:
    """The status of each run, in the order of `run_dirs`. Each scheduler is asked only once for all its runs.

    A run whose records cannot be read has the state `unknown`, with the reason. matrix_name: as for `Workspace.number_cells`.
    """
    with gc_pause.pause_collector():
        statuses, cell_handles = _make_statuses(workspace, run_dirs), workspace.number_cells(matrix_name)
        for status in statuses:
            status.handle = handles.make_handle(status.id, cell_handles)
        return statuses


def _make_statuses(workspace: Workspace, run_dirs: Sequence[RunDir]) -> list[Status]:
    runs_or_errors, lease = [_read_run_or_error(run_dir) for run_dir in run_dirs], inventory.read_lease(workspace)
    observed_by_id: dict[str, ObservedRun] = {}
    for scheduler_name, runs in group_by_scheduler(
        run_or_error for run_or_error in runs_or_errors if isinstance(run_or_error, RunOnDisk)
    ).items():
        observed_runs = find_scheduler(scheduler_name).observe(workspace, runs)
        observed_by_id |= {
            run_or_error.run_dir.run_id: observed_run for run_or_error, observed_run in zip(runs, observed_runs, strict=True)
        }
    statuses = []
    for run_dir, run_or_error in zip(run_dirs, runs_or_errors, strict=True):
        status = (
            run_guard.run_guarded(partial(_make_status, run_or_error, observed_by_id[run_dir.run_id], lease))
            if isinstance(run_or_error, RunOnDisk)
            else run_or_error
        )
        statuses.append(status if isinstance(status, Status) else _make_unreadable_status(run_dir, status))
    return statuses


def read_run_on_disk(run_dir: RunDir) -> RunOnDisk:
    """Read a run from its folder, without asking the scheduler. Raises InputError or WorkspaceError, which name the file, if a
    record cannot be read, and UnknownName if this version has no such scheduler."""
    run, events = run_dir.read_run(), run_dir.read_events(strict=True)
    find_scheduler(run.scheduler)  # raises UnknownName
    verdict, result = run_dir.judge_with_result(events, run)
    return RunOnDisk(run_dir, run, events, verdict, result)


def find_unreadable_status(run_dir: RunDir) -> Status | None:
    """The status of a run whose records cannot be read; None if they can be read."""
    run_or_error = _read_run_or_error(run_dir)
    return None if isinstance(run_or_error, RunOnDisk) else _make_unreadable_status(run_dir, run_or_error)


def find_blocking_status(run_dir: RunDir) -> Status | None:
    """The status of a run whose folder must not be rendered again, because a job may execute the run; None if the folder may be
    rendered again.

    Such a folder has records that cannot be read, or a claim although its records do not say that the run was submitted.
    """
    run_or_error = _read_run_or_error(run_dir)
    if isinstance(run_or_error, RunOnDisk) and run_or_error.verdict.state == "planned" and run_dir.claim.exists():
        run_or_error = ShardlabError(f"{run_dir.claim}: the run is claimed, but its records do not say that it was submitted")
    return None if isinstance(run_or_error, RunOnDisk) else _make_unreadable_status(run_dir, run_or_error)


def _read_run_or_error(run_dir: RunDir) -> RunOnDisk | ShardlabError:
    return run_guard.run_guarded(lambda: read_run_on_disk(run_dir))


def _make_status(run_on_disk: RunOnDisk, observed: ObservedRun, lease: Lease | None) -> Status:
    run_dir, run = run_on_disk.run_dir, run_on_disk.run
    verdict = judge_with_lease(
        run_on_disk, observed, lease, find_run_span(run_on_disk.events, observed.verdict.state)[1], datetime.now(UTC)
    )
    result = run_on_disk.result or run_dir.read_result() if verdict.state == "completed" else None
    has_steps = result is None and verdict.state != "planned"
    suspensions = suspension.read_suspensions(run_on_disk.events)
    progress = RunProgress()
    progress.add_records(suspension.mark_suspended(run_dir.steps(0).records, suspensions) if has_steps else ())
    rate_per_s, eta_s = progress.compute_rate_per_s(run.cell), progress.estimate_left_s(run.cell)
    started_at, ended_at = find_run_span(run_on_disk.events, verdict.state)
    end_or_now = ended_at or (datetime.now(UTC) if verdict.state == "running" else None)
    resumed_step = next((event.data.get("step") for event in reversed(run_on_disk.events) if event.event == "resumed"), None)
    return Status(
        id=run.run_id,
        cell=msgspec.to_builtins(run.cell),
        state=verdict.state,
        why=verdict.why or (retry_budget.describe_retry(run, run_on_disk.events) if verdict.state in STATES_WITH_RETRY else ""),
        scheduler={"name": run.scheduler, "id": observed.job_id, "raw": observed.scheduler_words},
        step=result.steps if result else progress.last_step,
        steps=result.steps if result else run.cell.steps,
        # The throughput in the result of a run that was suspended would include the time of the suspension, so it is left out.
        throughput=rate_per_s if result is None else None if suspensions else result.throughput_per_s,
        unit=result.unit if result else None,
        eta_s=eta_s if verdict.state == "running" else None,
        started=started_at,
        ended=ended_at,
        duration_s=max((end_or_now - started_at).total_seconds(), 0) if started_at and end_or_now else None,
        hosts=_list_hosts(run_on_disk),
        attempt=run.attempt,
        repeat=run.repeat,
        rehearsal=was_rehearsal(run, result or run_on_disk.result, run_on_disk.events),
        resumed_from_step=resumed_step,
        expected=verdict.state == "completed" or verdict.state in run.cell.expect,
        held=verdict.held,
        leftover=observed.is_leftover,
        trouble=recorder_ends.describe_early_ends(run_on_disk.events),
        search=run.search,
        retried=retry_budget.list_retried_states(run, run_on_disk.events),
        retries_allowed={
            state: retry_limit for state in Retry.__struct_fields__ if (retry_limit := run.find_retry_limit(state))
        },
    )


def find_run_span(events: Sequence[Event], run_state: str) -> tuple[datetime | None, datetime | None]:
    """When a run first started and when it ended, by the clock of its supervisor: (start, end).

    events: the events of the run. run_state: its state. The end is None if the run waits for another start after a requeue, or
    if its supervisor was lost.
    """
    timed_events = sorted((event.wall_s, event.event) for event in events if event.writer == "attempt")
    start_times = [wall_s for wall_s, event_kind in timed_events if event_kind == "started"]
    end_times = [wall_s for wall_s, event_kind in timed_events if event_kind == "exited"]
    last_end_s = (
        end_times[-1] if end_times and start_times and end_times[-1] >= start_times[-1] and run_state in FINAL_STATES else None
    )
    return _to_datetime(start_times[0] if start_times else None), _to_datetime(last_end_s)


def _to_datetime(wall_s: float | None) -> datetime | None:
    return datetime.fromtimestamp(wall_s, UTC) if wall_s is not None else None


def _list_hosts(run_on_disk: RunOnDisk) -> list[str]:
    """The machines on which the ranks run. The machine of the supervisor is included, unless the scheduler may start the
    supervisor on another machine than the ranks."""
    is_elsewhere = run_on_disk.run.scheduler in ("ssh", "allocation")
    supervisor_hosts = {event.host for event in run_on_disk.events if event.writer == "attempt" and not is_elsewhere}
    # The analysis of traces starts no ranks that write env/HOST.json, but each of its hosts has samples.
    sampled_hosts = run_on_disk.run_dir.list_sampled_hosts() if run_on_disk.run.traces is not None else []
    return sorted({*supervisor_hosts, *run_on_disk.run_dir.list_hosts(), *sampled_hosts})


def select_last_attempts(run_dirs: Iterable[RunDir]) -> list[RunDir]:
    """For each repeat of each cell, only the folder of the last attempt, in the order of the first attempts."""
    last_by_first_id: dict[str, RunDir] = {}
    for run_dir in run_dirs:
        first_id, attempt = split_attempt(run_dir.run_id)
        if first_id not in last_by_first_id or attempt > split_attempt(last_by_first_id[first_id].run_id)[1]:
            last_by_first_id[first_id] = run_dir
    return list(last_by_first_id.values())


def _make_unreadable_status(run_dir: RunDir, error: ShardlabError) -> Status:
    remedy = f"restore the file, or move the folder {run_dir.path} out of runs/ and run `jobs submit` to create it again"
    with contextlib.suppress(ShardlabError):  # the events of the run may be damaged, too
        job, token = run_dir.find_sent_job()
        if job:
            cluster, _, job_number = job.rpartition(":")
            cancel_words = address_cluster(["scancel", f"--name={token}", job_number], cluster or None)
            remedy += f" (its job {job} may be queued or running: `{' '.join(cancel_words)}` cancels it)"
    return Status(
        id=run_dir.run_id,
        cell=None,
        state="unknown",
        why=f"set aside: {str(error).rstrip('.')}; {remedy}.",
        scheduler={"name": "-", "id": "-", "raw": "-"},
        step=None,
        steps=None,
        throughput=None,
        unit=None,
        eta_s=None,
        started=None,
        ended=None,
        duration_s=None,
        hosts=[],
        attempt=None,
        repeat=None,
        rehearsal=None,
        expected=False,
    )


def judge_with_lease(
    run_on_disk: RunOnDisk, observed: ObservedRun, lease: Lease | None, ended_at: datetime | None, current_time: datetime
) -> JudgedState:
    """The state of a run, with the end of the lease taken into account.

    Without a lease, and before the lease ends, this is the state that the scheduler observed. After the end of the lease, the
    state by the scheduler still counts if the scheduler answers, because the lease may have been extended.

    observed: the state by the scheduler. ended_at: when the supervisor recorded the end of the run; None if it recorded no end.
    current_time: the current time."""
    if lease is None or not lease.has_ended(current_time):
        return observed.verdict
    is_lost = observed.verdict.state == "node_fail" and (ended_at is None or ended_at >= lease.expires)
    if is_lost and lease_cutoff.was_running_at_end(_find_last_record_time(run_on_disk), lease):
        return JudgedState("node_fail", f"{lease_cutoff.describe_lease_end(lease)}: {observed.verdict.why}")
    if not observed.is_unanswered:
        return observed.verdict
    return lease_cutoff.judge_by_records(observed.verdict, lease, _find_last_record_time(run_on_disk), current_time)


def _find_last_record_time(run_on_disk: RunOnDisk) -> datetime:
    """The time of the last record in the run's folder, by the clocks of the nodes."""
    moments_s = [event.wall_s for event in run_on_disk.events]
    moments_s += [record.wall_s for record in run_on_disk.run_dir.steps(0).records[-1:]]
    for host_name in run_on_disk.run_dir.list_hosts():
        moments_s += [
            sample.wall_s for sample in read_records(run_on_disk.run_dir.samples_file(host_name), Sample).records[-1:]
        ]
    return datetime.fromtimestamp(max(moments_s, default=0.0), UTC)
