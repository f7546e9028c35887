"""The claim of a run: one start of one job has the run, after a requeue the next start of the same job, never two at a time."""

from __future__ import annotations

import os
from typing import Literal

from shardlab import checkpoint, files
from shardlab.errors import ShardlabError, WorkspaceError
from shardlab.rundir import RunDir

OWNER = "job"
# Records of an earlier start, which must not be mixed with the records of this start.
RECORDS = ("steps", "samples", "trace", "memory", "validation.jsonl", "result.json")


def job() -> str:
    """Slurm's number of the job that this process is in; '' outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID", "")


def token() -> dict[str, str]:
    """The token of the submission of which this process is a part, as data of an event; nothing outside of Slurm.

    The token is the job's name (jobs.slurm.submission).
    """
    return {"token": os.environ["SLURM_JOB_NAME"]} if job() and "SLURM_JOB_NAME" in os.environ else {}


def restarts() -> int:
    """How often Slurm has started this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def take(folder: RunDir) -> Literal["first", "again"] | None:
    """Claim the run for this start of the job; None if the run belongs to another start. Raises WorkspaceError."""
    try:
        folder.claim.mkdir()
    except FileExistsError:
        return "again" if restarts() and _is_ours(folder) and _may_start_again(folder) else None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "claim") from error
    files.write_atomic(folder.claim / OWNER, f"{job()}\n".encode())
    return "first"


def claim_as_cancelled(folder: RunDir) -> bool:
    """Claim a run so that nothing starts it, and record that it was cancelled; False if it is claimed already."""
    try:
        folder.claim.mkdir()
    except FileExistsError:
        return False
    folder.write_event("controller", "cancelled")
    return True


def is_of_job(folder: RunDir) -> bool:
    """Whether a job has taken the run. The claim of `jobs cancel` is not one: it names no job, and the run did not start."""
    if (folder.claim / OWNER).exists():
        return True
    try:
        return any(event.event in ("started", "exited") for event in folder.events())
    except ShardlabError:  # the run is set aside by itself
        return False


def lost(folder: RunDir) -> bool:
    """Whether a later start of the job has the run: Slurm may have given up this node, although it still runs the ranks."""
    return (folder.claim / _start(restarts() + 1)).exists()


def set_aside(folder: RunDir) -> None:
    """Move the records of an earlier start away, unless it left a checkpoint to resume from. Raises WorkspaceError."""
    if checkpoint.whole(folder.path):
        return
    aside = folder.path / f"before-{_start(restarts())}"
    with files.as_workspace_error("move"):
        for name in RECORDS:
            if (folder.path / name).exists():
                aside.mkdir(exist_ok=True)
                (folder.path / name).rename(aside / name)


def _is_ours(folder: RunDir) -> bool:
    try:
        return (folder.claim / OWNER).read_text().strip() == job()
    except FileNotFoundError:
        return True  # whoever took it was killed before the next line, and we are a job that was started before


def _may_start_again(folder: RunDir) -> bool:
    """A job may hold several runs (--pack). Its runs that completed, or that a person cancelled, do not change."""
    if folder.judge().state in ("completed", "cancelled"):
        return False
    try:
        (folder.claim / _start(restarts())).mkdir()
    except FileExistsError:
        return False
    return True


def _start(number: int) -> str:
    return f"restart-{number}"
