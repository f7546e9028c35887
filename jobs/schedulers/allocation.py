"""The scheduler `allocation`: runs start one after another inside a Slurm allocation that the user already has.

The queue works like the queue of the scheduler `local`, but the runner (the process that starts the runs) is inside the
allocation, and the ranks of a run are started as a job step.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs import claim
from jobs.run_queue import QueueScheduler, RunQueue
from jobs.scheduler import ObservedRun, RunOnDisk, SubmitOptions
from jobs.schedulers import slurm
from jobs.slurm import allocation, query
from jobs.slurm.commands import has_slurm_commands
from shardlab.errors import ShardlabError
from shardlab.runs.record import Event
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import TOLD_REASON
from shardlab.workspace.workspace import Workspace

ENDED_WHY = (
    "the allocation {job} ended before the run started; `jobs submit` submits the run by sbatch, or, with --in-allocation, "
    "inside another allocation"
)


class AllocationScheduler(QueueScheduler):
    """Starts runs inside the Slurm allocation of this process, one at a time."""

    NAME = "allocation"
    TEMPLATE = "launch/allocation.sh.j2"
    TEMPLATES = (TEMPLATE,)

    def submit(self, workspace: Workspace, run_dirs: Sequence[RunDir], submit_options: SubmitOptions) -> None:
        """Submit runs, in this order, and start a runner in this allocation. Raises ShardlabError if the workspace has a runner
        in another allocation."""
        other_job = RunQueue(self.NAME, workspace).read_runner_variable("SLURM_JOB_ID")
        if other_job is not None and other_job != claim.current_job_id():
            raise ShardlabError(
                f"{workspace.path}: runs of this workspace are being started in the allocation {other_job}, not in this one. "
                "Wait until they have ended, or use another --workspace."
            )
        super().submit(workspace, run_dirs, submit_options)

    def attend(self, workspace: Workspace) -> None:
        """Start a runner if runs wait, no runner is alive and this process runs in an allocation."""
        if claim.current_job_id():
            super().attend(workspace)

    def observe(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
        """The state of each run. Slurm is asked once why it ended runs that it told to end, until their state is recorded."""
        observed_runs = super().observe(workspace, runs)
        end_events = {position: end for position, run in enumerate(runs) if (end := _find_unexplained_end(run)) is not None}
        jobs = {position: _find_job(runs[position]) for position in end_events}
        if not (numbers := sorted(set(jobs.values()) - {""})) or not has_slurm_commands():
            return observed_runs
        answer = query.find_jobs(numbers, min(end.wall_s for end in end_events.values()))
        for position, end in end_events.items():
            job = answer.jobs.get(jobs[position])
            if job is not None and job.start_s is not None and job.start_s <= end.wall_s:  # else the number was given again
                verdict = slurm.judge_after_end(runs[position], job, is_shared=True)
                observed_runs[position] = ObservedRun(verdict, job.id, job.state)
        slurm.record_learnt_ends(workspace, runs, observed_runs)
        return observed_runs

    def may_start(self, run_dir: RunDir) -> bool:
        """Whether the allocation of this process still exists, so that the run may start. If the allocation has ended, the
        state of the run becomes `planned` again, with the reason."""
        if not allocation.has_ended(claim.current_job_id()):
            return True
        run_dir.write_event("queue", "refused", why=ENDED_WHY.format(job=claim.current_job_id()))
        return False


def _find_unexplained_end(run: RunOnDisk) -> Event | None:
    """The last end of a run if Slurm told the run to end and the state is still `failed`; else None."""
    end = next((event for event in reversed(run.events) if event.event == "exited"), None)
    is_unexplained = end is not None and end.data.get("reason") == TOLD_REASON and run.verdict.state == "failed"
    return end if is_unexplained else None


def _find_job(run: RunOnDisk) -> str:
    """The number of the allocation in which the run last started; '' if it is not recorded."""
    return next((str(event.data.get("job", "")) for event in reversed(run.events) if event.event == "started"), "")


SCHEDULER = AllocationScheduler()
if __name__ == "__main__":
    SCHEDULER.run_as_runner()
