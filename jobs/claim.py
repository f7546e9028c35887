"""The claim of a run makes sure that at most one process at a time executes the run.

The claim is the folder `claim` in the run's folder: only one process can create this folder. If Slurm requeues the job of the
run, the next start of the same job takes over the claim.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Literal

from shardlab.errors import ShardlabError, WorkspaceError
from shardlab.files import files
from shardlab.record_types import TOKEN_PATTERN
from shardlab.runs import checkpoint
from shardlab.runs.record import Event
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import TOLD_REASON, drop_learnt_ends, find_last_sending

JOB_ID_FILE = "job"
# The names of a run's records. The records of an earlier start must not be mixed with the records of this start.
RECORD_NAMES = ("steps", "samples", "trace", "memory", "validation.jsonl", "result.json")


def read_own_job_id() -> str:
    """Slurm's number of the job in which this process runs; '' outside of a Slurm job."""
    return os.environ.get("SLURM_JOB_ID", "")


def make_token_event_data() -> dict[str, str]:
    """The token of the submission to which the job of this process belongs, as data for an event; empty outside of Slurm.

    The token, which shardlab chooses for each submission, is the name of the job (jobs.slurm.submission).
    """
    job_name = os.environ.get("SLURM_JOB_NAME", "")
    return {"token": job_name} if read_own_job_id() and re.search(TOKEN_PATTERN, job_name) else {}


def count_job_restarts() -> int:
    """How often Slurm has restarted the job of this process; 0 at the first start of the job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def claim_run(run_dir: RunDir) -> Literal["first", "again"] | None:
    """Claim the run for this start of the job. Raises WorkspaceError.

    Returns `first` if no start had claimed the run before, `again` if an earlier start of the same job had claimed it, and None
    if this start must not run it, because the run belongs to another start or has ended for good.
    """
    try:
        run_dir.claim.mkdir()
    except FileExistsError:
        return "again" if count_job_restarts() and _belongs_to_this_job(run_dir) and _may_start_again(run_dir) else None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "claim") from error
    files.write_atomic(run_dir.claim / JOB_ID_FILE, f"{read_own_job_id()}\n".encode())
    return "first"


def claim_as_cancelled(run_dir: RunDir) -> bool:
    """Claim a run that a person cancels, so that no job starts the run, and record the event `cancelled`. Returns False, and
    records nothing, if the run was claimed already."""
    try:
        run_dir.claim.mkdir()
    except FileExistsError:
        return False
    run_dir.write_event("controller", "cancelled")
    return True


def is_claimed_by_job(run_dir: RunDir) -> bool:
    """Whether a job has claimed the run. False for a run that only `jobs cancel` claimed: such a claim names no job."""
    if (run_dir.claim / JOB_ID_FILE).exists():
        return True
    try:
        return any(event.event in ("started", "exited") for event in run_dir.read_events())
    except ShardlabError:  # the records cannot be read, so every command skips this run anyway
        return False


def count_claims_after_restart(run_dir: RunDir) -> int:
    """How often Slurm restarted the job of the run, and the job claimed the run again."""
    return sum(entry_name.startswith(_format_restart_name("")) for entry_name in files.list_names(f"{run_dir.claim}"))


def is_taken_over(run_dir: RunDir) -> bool:
    """Whether a later start of the job has taken over the run. This happens if Slurm gave up this node as lost and requeued the
    job, although the node still runs the ranks."""
    return (run_dir.claim / _format_restart_name(count_job_restarts() + 1)).exists()


def move_earlier_records(run_dir: RunDir) -> None:
    """Move the records of an earlier start of the run into the folder before-restart-N of the run's folder. If the earlier
    start left a checkpoint, nothing is moved: this start resumes from the checkpoint and continues the records. Raises
    WorkspaceError."""
    if checkpoint.list_checkpoints(run_dir.path):
        return
    earlier_folder = run_dir.path / f"before-{_format_restart_name(count_job_restarts())}"
    with files.as_workspace_error("move"):
        for record_name in RECORD_NAMES:
            if (run_dir.path / record_name).exists():
                earlier_folder.mkdir(exist_ok=True)
                (run_dir.path / record_name).rename(earlier_folder / record_name)


def _belongs_to_this_job(run_dir: RunDir) -> bool:
    try:
        return files.read(run_dir.claim / JOB_ID_FILE).decode(errors="replace").strip() == read_own_job_id()
    except FileNotFoundError:
        return True  # an earlier start of this job made the claim and was killed before it wrote its job number


def _may_start_again(run_dir: RunDir) -> bool:
    """Whether this start of a requeued job may execute the run; if so, this start is recorded in the claim.

    A job may contain several runs (--pack). Runs of the job that completed, or that a person cancelled, must not run again.
    Runs that ended for a reason of their own must not run again either, unless their supervisor asked for this restart.
    """
    events = drop_learnt_ends(run_dir.read_events())  # Slurm starts the run again after what was learnt from Slurm
    recorded_state = run_dir.judge_with_result(events)[0].state
    if recorded_state in ("completed", "cancelled"):
        return False
    end_event = next((event for event in reversed(events) if event.event == "exited"), None)
    if end_event is not None and recorded_state in _list_states_caused_by_run(events, end_event):
        was_requeued = any(event.event == "requeued" and event.wall_s >= end_event.wall_s for event in events)
        return was_requeued and _record_start(run_dir)
    return _record_start(run_dir)


def _record_start(run_dir: RunDir) -> bool:
    """Record this start in the claim. Returns False if another process has recorded the same start."""
    try:
        (run_dir.claim / _format_restart_name(count_job_restarts())).mkdir()
    except FileExistsError:
        return False
    return True


def _list_states_caused_by_run(events: Sequence[Event], end_event: Event) -> set[str]:
    """The states in which a run ended for a reason of its own. end_event: the event of its end.

    The state `failed` is included only for a run of a packed allocation, because another run of the job may have caused the
    restart. If the job has only this run, a failing node may have ended the run, and Slurm restarts the job for this reason.
    """
    failed_by_itself = is_packed(events) and end_event.data.get("reason") != TOLD_REASON
    return {"oom", "timeout", "hung", *(["failed"] if failed_by_itself else [])}


def is_packed(events: Sequence[Event]) -> bool:
    """Whether the run shares its job with other runs, one after another (--pack). events: the events of the run."""
    last_sending = find_last_sending(events)
    return last_sending is not None and last_sending.data.get("kind") == "pack"


def _format_restart_name(restart_number: int | str) -> str:
    return f"restart-{restart_number}"
