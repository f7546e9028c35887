"""Decides whether a run is started again by itself after it has ended, within its budget (the key `retry` of a matrix).

Slurm starts the job of the run again, when the supervisor of the run asks for it. For the other schedulers, the supervisor puts
a new attempt into the queue before it records the end of the run. So if the supervisor is killed at any moment, there is at
most one next attempt, and no run is seen as ended before its next attempt is in the queue.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from jobs import claim
from jobs.slurm.commands import ENDED_S, call
from jobs.ssh.step import LOST
from shardlab.errors import ShardlabError
from shardlab.matrix.retry import SHARED_ON_SLURM
from shardlab.runs import checkpoint, prediction
from shardlab.runs.record import Event
from shardlab.runs.run import Run, run_id
from shardlab.runs.rundir import RunDir

REQUEUED = "requeued"  # the event of a supervisor that asks Slurm to start the job of its run again


class RestartedTooOften(ShardlabError):
    """Slurm has restarted a run more often than the run's budget allows."""


def spent(run: Run, events: Sequence[Event]) -> list[str]:
    """The states after which the run was started again by itself, in order: first the states of earlier attempts, then the
    states of earlier starts in the same job. Restarts of Slurm's own accord are left out, because Slurm does not tell their
    reason."""
    return [*run.retried, *(str(event.data["after"]) for event in events if event.event == REQUEUED and "after" in event.data)]


def slurm_restarts(folder: RunDir, run: Run, events: Sequence[Event]) -> int:
    """How often Slurm started the run again after a failed node or a preemption, of its own accord or on request."""
    requests = sum(event.event == REQUEUED for event in events)
    asked = sum(state in SHARED_ON_SLURM for state in spent(run, events))
    return max(claim.times_again(folder) - requests, 0) + asked


def must_be_within_budget(folder: RunDir, run: Run) -> None:
    """Raises RestartedTooOften if Slurm has restarted the run more often than allowed."""
    if run.scheduler != "slurm":
        return
    restarts, allowed = slurm_restarts(folder, run, folder.events()), run.retries_after("node_fail")
    if restarts > allowed:
        raise RestartedTooOften(f"Slurm has restarted the run {restarts} times; allowed: {allowed}.")


def is_left(folder: RunDir, run: Run, state: str) -> bool:
    """Whether the budget of the run allows another start after it ended in this state."""
    if state in run.cell.expect:
        return False
    events = folder.events()
    if run.scheduler == "slurm" and state in SHARED_ON_SLURM:
        used = slurm_restarts(folder, run, events)
    else:
        used = spent(run, events).count(state)
    return used < run.retries_after(state)


def after(folder: RunDir, run: Run, end: Mapping[str, Any], saved: int) -> str | None:
    """The state in which this start of the run ends, if the run must be started again after this state; otherwise None.

    end: the data of the event `exited`, which is not recorded yet. saved: the step of the newest checkpoint when this start of
    the run began. After a time limit without a newer checkpoint, another start would only repeat the same steps.
    """
    if end["reason"] == "told":  # only Slurm knows why it told the run to end, and whether it starts the run again
        return None
    state = folder.judged_at(end, run).state
    if state == "timeout" and saved_step(folder) <= saved:
        return None
    return state if is_left(folder, run, state) else None


def saved_step(folder: RunDir) -> int:
    """The step of the newest complete checkpoint of a run; 0 if the run has no checkpoint."""
    return max((checkpoint.step_of(path) for path in checkpoint.whole(folder.path)), default=0)


def resumable(runs: Path, run: Run) -> list[tuple[str, int]]:
    """The attempts from which the next attempt at a run may resume, as (run id, step), the latest step first.

    runs: the folder of all runs. run: the last attempt.
    """
    attempts = [runs / run_id(run.cell, run.repeat, attempt) for attempt in range(run.attempt, 0, -1)]
    saved = [(path.name, checkpoint.step_of(checkpoints[0])) for path in attempts if (checkpoints := checkpoint.whole(path))]
    return sorted(saved, key=lambda entry: entry[1], reverse=True)


def named_lost_nodes(folder: RunDir) -> list[str]:
    """The nodes that the events of a run name as lost; empty with Slurm, whose runs record no such event."""
    return [str(event.data["node"]) for event in folder.events() if event.event == LOST]


def in_words(run: Run, events: Sequence[Event]) -> str:
    """Which retry the present start of the run is, such as `attempt 2 after failed (retry 1 of 1)`; '' if it is no retry."""
    states = spent(run, events)
    if not states:
        return ""
    what = "started again" if any(event.event == REQUEUED for event in events) else f"attempt {run.attempt}"
    return f"{what} after {states[-1]} (retry {states.count(states[-1])} of {run.retries_after(states[-1])})"


def queue_next(folder: RunDir, run: Run, state: str) -> str:
    """Put the next attempt at a run into the queue of its scheduler. Only one process can make this attempt.

    folder, run: the folder and the run.json of the attempt that ends in `state`. Returns '', or why the attempt was not made;
    the next `jobs submit` then makes the attempt.
    """
    # These imports are not at the top of the file, because the supervisor imports this module and rarely needs them.
    from jobs import render, render_again
    from jobs.run_queue import executed_files
    from shardlab.workspace import workspace_trust
    from shardlab.workspace.workspace import Workspace

    following = msgspec.structs.replace(
        run,
        run_id=run_id(run.cell, run.repeat, run.attempt + 1),
        attempt=run.attempt + 1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        resume=[name for name, _ in resumable(folder.path.parent, run)],
        avoid=list(dict.fromkeys([*run.avoid, *(named_lost_nodes(folder) if state == "node_fail" else [])])),
        retried=[*run.retried, state],
    )

    def submitted(new: RunDir) -> None:
        new.write_event("retry", "submitted", scheduler=run.scheduler)

    try:
        source = render_again.context(folder, following)
        if (predicted := prediction.read(folder.path)) is not None:
            source = msgspec.structs.replace(source, predicted={run.cell.name(): predicted})
        new = render.write(following, folder.path.parent, source, before=submitted)
        workspace_trust.keep(Workspace(folder.path.parent.parent), *executed_files(new))
    except ShardlabError as error:
        return str(error)
    return ""


def requeue(folder: RunDir, run: Run, state: str) -> str:
    """Ask Slurm to start the job of this process again. state: the state in which the run ended.

    Returns '', or Slurm's words if Slurm does not start the job again. In a packed allocation, this process waits until Slurm
    ends it: if this process returned, the allocation would start its next run.
    """
    job, events = claim.job(), folder.events()
    used = spent(run, events).count(state) + 1
    why = f"retry {used} of {run.retries_after(state)} after {state}"
    folder.write_event("attempt", REQUEUED, after=state, why=why)
    # Slurm requeues only jobs with Requeue=1. A job with Requeue=0 belongs to a run that Slurm must not restart of its own
    # accord. If Slurm restarts the run of its own accord after this command, the next start of the run finds that the restart
    # was not allowed.
    call(["scontrol", "update", f"JobId={job}", "Requeue=1"])
    if is_packed := claim.is_packed(events):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Slurm may end this process before the next command returns
    answer = call(["scontrol", "requeue", job])
    if answer.ends_own_job and is_packed:
        time.sleep(ENDED_S)
    return "" if answer.ends_own_job else answer.says
