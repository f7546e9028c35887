"""Starts a run again by itself after a bad end: puts a new attempt into the queue, or lets Slurm start the job again.

Whether it is started again is decided in jobs/status/retry_budget.py, and how often at most in shardlab/matrix/retry.py.

Slurm starts the job of the run again, when the supervisor of the run asks for it. For the other schedulers, the supervisor puts
a new attempt into the queue before it records the end of the run. So if the supervisor is killed at any moment, there is at
most one next attempt, and no run is seen as ended before its next attempt is in the queue.
"""

from __future__ import annotations

import signal
import time
from datetime import UTC, datetime

import msgspec

from jobs import claim
from jobs.slurm.commands import ENDED_S, call_slurm, read_own_cluster
from jobs.status.retry_budget import REQUEUED_EVENT, list_resumable_attempts, list_retried_states, read_lost_nodes
from shardlab.errors import ShardlabError
from shardlab.runs import prediction
from shardlab.runs.run import Run, make_run_id
from shardlab.runs.rundir import RunDir


def queue_next(run_dir: RunDir, run: Run, end_state: str) -> str:
    """Put the next attempt at a run into the queue of its scheduler. Only one process can make this attempt.

    folder, run: the folder and the run.json of the attempt that ends in `end_state`. Returns '', or why the attempt was not
    made; the next `jobs submit` then makes the attempt.
    """
    # These imports are not at the top of the file, because the supervisor imports this module and rarely needs them.
    from jobs.rendering import render, render_again
    from jobs.run_queue import list_executed_files
    from shardlab.workspace import workspace_trust
    from shardlab.workspace.workspace import Workspace

    next_run = msgspec.structs.replace(
        run,
        run_id=make_run_id(run.cell, run.repeat, run.attempt + 1),
        attempt=run.attempt + 1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        resume=[name for name, _ in list_resumable_attempts(run_dir.path.parent, run)],
        avoid=list(dict.fromkeys([*run.avoid, *(read_lost_nodes(run_dir) if end_state == "node_fail" else [])])),
        retried=[*run.retried, end_state],
    )

    def record_submission(new_run_dir: RunDir) -> None:
        new_run_dir.write_event("retry", "submitted", scheduler=run.scheduler)

    try:
        render_context = render_again.read_render_context(run_dir, next_run)
        if (run_prediction := prediction.read_prediction(run_dir.path)) is not None:
            render_context = msgspec.structs.replace(render_context, predictions={run.cell.name(): run_prediction})
        new_run_dir = render.write_run_folder(next_run, run_dir.path.parent, render_context, prepare=record_submission)
        workspace_trust.extend_consent(Workspace(run_dir.path.parent.parent), *list_executed_files(new_run_dir))
    except ShardlabError as error:
        return str(error)
    return ""


def requeue_job(run_dir: RunDir, run: Run, end_state: str) -> str:
    """Ask Slurm to start the job of this process again. end_state: the state in which the run ended.

    Returns '', or Slurm's words if Slurm does not start the job again. In a packed allocation, this process waits until Slurm
    ends it: if this process returned, the allocation would start its next run.
    """
    job_id, cluster, events = claim.read_own_job_id(), read_own_cluster(), run_dir.read_events()
    used_retries = list_retried_states(run, events).count(end_state) + 1
    retry_text = f"retry {used_retries} of {run.find_retry_limit(end_state)} after {end_state}"
    run_dir.write_event("attempt", REQUEUED_EVENT, after=end_state, why=retry_text)
    # Slurm requeues only jobs with Requeue=1. A job with Requeue=0 belongs to a run that Slurm must not restart of its own
    # accord. If Slurm restarts the run of its own accord after this command, the next start of the run finds that the restart
    # was not allowed.
    call_slurm(["scontrol", "update", f"JobId={job_id}", "Requeue=1"], cluster=cluster)
    if is_packed := claim.is_packed(events):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Slurm may end this process before the next command returns
    output = call_slurm(["scontrol", "requeue", job_id], cluster=cluster)
    if output.ends_own_job and is_packed:
        time.sleep(ENDED_S)
    return "" if output.ends_own_job else output.error_line
