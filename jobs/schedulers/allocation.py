"""The scheduler `allocation`: runs start one after another inside a Slurm allocation that the user already has.

The queue works like the queue of the scheduler `local`, but the runner (the process that starts the runs) is inside the
allocation, and the ranks of a run are started as a job step.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs import claim, run_queue
from jobs.run_queue import SCRIPT, RunQueue, cancel, cancel_jobs, damaged, hold, release, resolve
from jobs.scheduler import ObservedRun, RunOnDisk, SubmitOptions
from jobs.slurm import allocation
from shardlab.errors import ShardlabError
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

__all__ = [
    "NAME", "POLL_S", "SCRIPT", "TEMPLATE", "TEMPLATES", "attend", "cancel", "cancel_jobs", "damaged", "hold", "observe",
    "release", "resolve", "submit",
]  # fmt: skip
NAME = "allocation"
TEMPLATE = "launch/allocation.sh.j2"
TEMPLATES = (TEMPLATE,)
POLL_S = 0.5
ENDED_WHY = (
    "the allocation {job} ended before the run started; `jobs submit` submits the run by sbatch, or, with --in-allocation, "
    "inside another allocation"
)


def submit(workspace: Workspace, folders: Sequence[RunDir], submit_options: SubmitOptions) -> None:
    """Submit runs, in this order, and start a runner in this allocation. Raises ShardlabError if the workspace has a runner in
    another allocation."""
    queue = RunQueue(NAME, workspace)
    other_job = queue.read_runner_variable("SLURM_JOB_ID")
    if other_job is not None and other_job != claim.current_job_id():
        raise ShardlabError(
            f"{workspace.path}: runs of this workspace are being started in the allocation {other_job}, not in this one. Wait "
            "until they have ended, or use another --workspace."
        )
    queue.submit(folders)


def attend(workspace: Workspace) -> None:
    """Start a runner if runs wait, no runner is alive and this process runs in an allocation."""
    if claim.current_job_id():
        RunQueue(NAME, workspace).attend()


def observe(workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
    """The state of each run, from its events and from the supervisors on this machine."""
    return RunQueue(NAME, workspace).observe(runs)


def work(workspace: Workspace) -> int:
    """The work of the runner: start the waiting runs one after another until no run waits; return the exit code. A workspace
    has only one runner at a time."""
    queue = RunQueue(NAME, workspace)
    return queue.work_off(lambda: queue.start_one_after_another(_may_start))


def _may_start(folder: RunDir) -> bool:
    """Whether the allocation of this process still exists, so that the run may start. If the allocation has ended, the state of
    the run becomes `planned` again, with the reason."""
    if not allocation.has_ended(claim.current_job_id()):
        return True
    folder.write_event("queue", "refused", why=ENDED_WHY.format(job=claim.current_job_id()))
    return False


if __name__ == "__main__":
    run_queue.run_as_runner(work)
