"""Decides whether a run is started again by itself after a bad end: its budget (shardlab/matrix/retry.py), and what is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import claim
from jobs.ssh.step import NODE_LOST_EVENT
from shardlab.errors import ShardlabError
from shardlab.matrix.retry import SHARED_ON_SLURM
from shardlab.runs import checkpoint, command_run
from shardlab.runs.record import Event
from shardlab.runs.run import Run, make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import TOLD_REASON

REQUEUED_EVENT = "requeued"  # the event of a supervisor that asks Slurm to start the job of its run again


class RestartedTooOften(ShardlabError):
    """Slurm has restarted a run more often than the run's budget allows."""


def list_retried_states(run: Run, events: Sequence[Event]) -> list[str]:
    """The states after which the run was started again by itself, in order: first the states of earlier attempts, then the
    states of earlier starts in the same job. Restarts of Slurm's own accord are left out, because Slurm does not tell their
    reason."""
    return [
        *run.retried,
        *(str(event.data["after"]) for event in events if event.event == REQUEUED_EVENT and "after" in event.data),
    ]


def count_slurm_restarts(run_dir: RunDir, run: Run, events: Sequence[Event]) -> int:
    """How often Slurm started the run again after a failed node or a preemption, of its own accord or on request."""
    request_count = sum(event.event == REQUEUED_EVENT for event in events)
    requested_restarts = sum(state in SHARED_ON_SLURM for state in list_retried_states(run, events))
    return max(claim.count_claims_after_restart(run_dir) - request_count, 0) + requested_restarts


def must_be_within_budget(run_dir: RunDir, run: Run) -> None:
    """Raises RestartedTooOften if Slurm has restarted the run more often than allowed."""
    if run.scheduler != "slurm":
        return
    restart_count = count_slurm_restarts(run_dir, run, run_dir.read_events())
    allowed_restarts = run.find_retry_limit("node_fail")
    if restart_count > allowed_restarts:
        raise RestartedTooOften(f"Slurm has restarted the run {restart_count} times; allowed: {allowed_restarts}.")


def allows_retry(run_dir: RunDir, run: Run, end_state: str) -> bool:
    """Whether the budget of the run allows another start after it ended in this state."""
    if end_state in run.cell.expect:
        return False
    events = run_dir.read_events()
    if run.scheduler == "slurm" and end_state in SHARED_ON_SLURM:
        used_retries = count_slurm_restarts(run_dir, run, events)
    else:
        used_retries = list_retried_states(run, events).count(end_state)
    return used_retries < run.find_retry_limit(end_state)


def find_retry_state(run_dir: RunDir, run: Run, end_data: Mapping[str, Any], saved_step: int) -> str | None:
    """The state in which this start of the run ends, if the run must be started again after this state; otherwise None.

    end_data: the data of the event `exited`, which is not recorded yet. saved_step: the step of the newest checkpoint when this
    start of the run began. After a time limit without a newer checkpoint, another start would only repeat the same steps."""
    if end_data["reason"] == TOLD_REASON:  # only Slurm knows why it told the run to end, and whether it starts the run again
        return None
    end_state = run_dir.judge_at_end(end_data, run).state
    if end_state == "timeout" and find_saved_step(run_dir) <= saved_step:
        return None
    return end_state if allows_retry(run_dir, run, end_state) else None


def find_saved_step(run_dir: RunDir) -> int:
    """The step of the newest complete checkpoint of a run; 0 if the run has no checkpoint."""
    return max((checkpoint.parse_checkpoint_step(path) for path in checkpoint.list_checkpoints(run_dir.path)), default=0)


def list_resumable_attempts(runs_dir: Path, run: Run) -> list[tuple[str, int]]:
    """The attempts from which the next attempt at a run may resume, as (run id, step), the latest step first.

    runs_dir: the folder of all runs. run: the last attempt.
    """
    attempt_folders = [runs_dir / make_run_id(run.cell, run.repeat, attempt) for attempt in range(run.attempt, 0, -1)]
    if run.cell.command is not None:
        folder_checkpoints = (
            (folder, command_run.find_checkpoint([RunDir(folder)], run.cell.command.checkpoint)) for folder in attempt_folders
        )
        return [(folder.name, command_run.parse_last_number(path)) for folder, path in folder_checkpoints if path is not None]
    saved_runs = [
        (folder.name, checkpoint.parse_checkpoint_step(checkpoints[0]))
        for folder in attempt_folders
        if (checkpoints := checkpoint.list_checkpoints(folder))
    ]
    return sorted(saved_runs, key=lambda saved_run: saved_run[1], reverse=True)


def read_lost_nodes(run_dir: RunDir) -> list[str]:
    """The nodes that the events of a run name as lost; empty with Slurm, whose runs record no such event."""
    return [str(event.data["node"]) for event in run_dir.read_events() if event.event == NODE_LOST_EVENT]


def describe_retry(run: Run, events: Sequence[Event]) -> str:
    """Which retry the present start of the run is, such as `attempt 2 after failed (retry 1 of 1)`; '' if it is no retry."""
    retried_states = list_retried_states(run, events)
    if not retried_states:
        return ""
    start_kind = "started again" if any(event.event == REQUEUED_EVENT for event in events) else f"attempt {run.attempt}"
    last_state, retry_count = retried_states[-1], retried_states.count(retried_states[-1])
    return f"{start_kind} after {last_state} (retry {retry_count} of {run.find_retry_limit(last_state)})"
