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
from jobs.slurm.commands import CLUSTER_VARIABLE, has_slurm_commands, own_cluster, read_setting
from shardlab.errors import ShardlabError
from shardlab.runs.record import Event
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import TOLD_REASON, name_job
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
        queue = RunQueue(self.NAME, workspace)
        other_job, other_cluster = (queue.read_runner_variable(name) for name in ("SLURM_JOB_ID", CLUSTER_VARIABLE))
        if other_job is not None and (other_job, other_cluster or None) != (claim.current_job_id(), own_cluster()):
            raise ShardlabError(
                f"{workspace.path}: runs of this workspace are being started in the allocation "
                f"{name_job(other_job, other_cluster or None)}, not in this one. "
                "Wait until they have ended, or use another --workspace."
            )
        super().submit(workspace, run_dirs, submit_options)

    def attend(self, workspace: Workspace) -> None:
        """Start a runner if runs wait, no runner is alive and this process runs in an allocation."""
        if claim.current_job_id():
            super().attend(workspace)

    def observe(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
        """The state of each run. Each cluster of Slurm is asked once why it ended runs that it told to end, until their state
        is recorded."""
        observed_runs = super().observe(workspace, runs)
        end_events = {position: end for position, run in enumerate(runs) if (end := _find_unexplained_end(run)) is not None}
        jobs = {position: own_job for position in end_events if (own_job := _find_job(runs[position])) is not None}
        if not jobs or not has_slurm_commands():
            return observed_runs
        since_s = min(end.wall_s for end in end_events.values())
        for cluster in dict.fromkeys(cluster for cluster, _ in jobs.values()):
            numbers = sorted({number for job_cluster, number in jobs.values() if job_cluster == cluster})
            asked_cluster = None if cluster is None or cluster == read_setting("ClusterName") else cluster
            answer = query.find_jobs(numbers, since_s, cluster=asked_cluster)
            for position, (job_cluster, number) in jobs.items():
                job = answer.jobs.get(number) if job_cluster == cluster else None
                # A job that started after the end of the run has been given the same number.
                if job is not None and job.start_s is not None and job.start_s <= end_events[position].wall_s:
                    verdict = slurm.judge_after_end(runs[position], job, is_shared=True)
                    observed_runs[position] = ObservedRun(verdict, name_job(job.id, asked_cluster), job.state)
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


def _find_job(run: RunOnDisk) -> tuple[str | None, str] | None:
    """(the cluster of Slurm, the number) of the allocation in which the run last started; None if it is not recorded. The
    cluster is None if only the number is recorded."""
    data = next((event.data for event in reversed(run.events) if event.event == "started"), {})
    return (data.get("cluster"), str(data["job"])) if data.get("job") else None


SCHEDULER = AllocationScheduler()
if __name__ == "__main__":
    SCHEDULER.run_as_runner()
