"""Holds pending runs when the installed packages have changed, and releases them when a person asks for it.

A run that is held and released stays the same attempt. All pending runs that were submitted with the same packages would find
the same change when they start, so the first run that finds the change holds all these runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from jobs import claim
from jobs.scheduler import find_scheduler
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import JudgedState, name_job
from shardlab.workspace.workspace import Workspace

HOLDING_S = 60.0  # the longest time in which a run holds the jobs of other runs after it has recorded that they are held
PACKAGES_CHANGED = "the installed packages changed since the run was submitted (digest {then}, now {now})"
HELD_WHY = "held, because {changed}: `jobs retry --only held` goes on with the packages that are installed then"


def hold_alike_runs(run_dir: RunDir, run: Run, why: str) -> str:
    """Hold the run for which this process was started, and all pending runs that were submitted with the same packages of the
    same environment.

    folder, run: the run of this process. why: the reason, for the events of the runs. In Slurm, the run's job is requeued,
    which ends this process. Returns why Slurm did not requeue the job, or ''.
    """
    run_dir.write_event("attempt", "held", why=why, requeued=claim.read_own_job_id())
    own_cluster = run_dir.find_sent_job()[0].rpartition(":")[0] or None
    own_job, token_by_job = name_job(claim.read_own_job_id(), own_cluster), dict[str, str]()
    for other_run in Workspace(run_dir.path.parent.parent).list_run_dirs():
        if (verdict := _judge_if_alike(other_run, run_dir, run)) is None:
            continue
        job, token = other_run.find_sent_job()
        if not verdict.held:
            # The runs of one packed allocation share one job, so they are requeued together with this run.
            other_run.write_event(f"hold.{run.run_id}", "held", why=why, requeued=own_job if job == own_job else "")
        # Another run may have recorded just now that `other` is held, but not have held its job yet. So this process holds the
        # job too: otherwise the job could start as soon as this job has left its node.
        if job and job != own_job and (not verdict.held or _is_being_held(other_run)):
            token_by_job[job] = token
    return find_scheduler(run.scheduler).hold_jobs(token_by_job)


def accept_packages(run: Run, packages: str, versions: dict[str, str]) -> Run:
    """The run.json with which a held run is released. It names the packages that are installed now, but still the copy of
    shardlab's source with which the run was submitted.

    packages: the digest of the installed packages. versions: the versions of the packages, by name.
    """
    kept_versions = {package: version for package, version in run.versions.items() if package == "shardlab"}
    return msgspec.structs.replace(run, packages=packages, versions=versions | kept_versions)


def release_runs(workspace: Workspace, runs: Sequence[Run]) -> None:
    """Let held runs start. runs: the held runs, as `accept_packages` returned them. Raises ShardlabError if the scheduler does
    not release them."""
    for scheduler_name in {run.scheduler for run in runs}:
        run_by_folder = {RunDir(workspace.runs / run.run_id): run for run in runs if run.scheduler == scheduler_name}
        for run_dir, run in run_by_folder.items():
            files.write_json(run_dir.run_json, run)
        find_scheduler(scheduler_name).release_jobs(
            dict(job for run_dir in run_by_folder if (job := run_dir.find_sent_job())[0])
        )
        for run_dir in run_by_folder:
            run_dir.write_event("controller", "released")
        find_scheduler(scheduler_name).restart_lost_runner(workspace)


def _judge_if_alike(other_dir: RunDir, run_dir: RunDir, run: Run) -> JudgedState | None:
    """The verdict on the run `other_dir` if it waits to start, held or not, and was submitted with the same packages as `run`,
    whose folder is `run_dir`; else None. None for `run` itself, and if the records of `other_dir` cannot be read."""
    if other_dir.run_id == run_dir.run_id or other_dir.claim.exists():
        return None
    try:
        if (verdict := other_dir.judge()).state != "pending":
            return None
        other_run = other_dir.read_run()
        is_alike = (other_run.packages, other_run.cell.environment) == (run.packages, run.cell.environment)
        return verdict if is_alike else None
    except ShardlabError:
        return None


def _is_being_held(run_dir: RunDir) -> bool:
    """Whether another run recorded within HOLDING_S that this run is held. Later, a person may already have released it."""
    last_held_s = max((event.wall_s for event in run_dir.read_events() if event.event == "held"), default=0.0)
    return abs(time.time() - last_held_s) < HOLDING_S
