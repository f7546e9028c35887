"""Submits exactly one job for each run: every submission is recorded with a token before it is sent to Slurm.

The token is the job's name. If this program is killed or the controller does not answer before the job's number is recorded,
the next command asks Slurm for the token. If Slurm has a job with this name, its number is recorded; otherwise the job is sent
again under the same token. If two jobs exist after all, the run's claim lets only one of them start the run (jobs.claim).
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from jobs import claim
from jobs.slurm import query
from jobs.slurm.commands import ControllerUnreachable, SlurmOutput, call_slurm, read_number_setting
from shardlab.cluster.sbatch_request import advise_on_rejection
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.record_types import SLURM_CLUSTER_PATTERN, Count, JobNumber, RunId, SlurmClusterName, Token, WallTime
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL_STATES, find_last_sending
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

SEARCH_INTERVAL_S = 1.0
MESSAGE_TIMEOUTS = 3  # number of Slurm's message timeouts during which a late answer may still arrive
MOST_NAMED_RUNS = 20  # the most runs that a line names, because a terminal may cut longer lines
SubmissionKind = Literal["one", "array", "pack"]
SubmitOption = Annotated[str, msgspec.Meta(pattern=r"^--(output|array|dependency)=")]  # the options that `jobs submit` adds
_NON_TOKEN_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")
_JOB_ID_PATTERN = re.compile(rf"^(\d+)(?:;({SLURM_CLUSTER_PATTERN[1:-2]}))?\Z")
# After sbatch has printed these words, it retries for two minutes. shardlab ends sbatch instead, because Slurm may accept a
# smaller array now.
_BUSY_PATTERN = re.compile(r"temporarily unable to accept job|job queue full")
# The words of sbatch if Slurm rejects a job because of a limit. Slurm may accept the job later, or accept a smaller job now.
# The limits are limits on submitted jobs (Assoc... and QOS..., Max and Grp), MaxJobCount, MaxArraySize, max_array_tasks, and
# the limit on requests.
LIMIT_PATTERN = re.compile(
    rf"{_BUSY_PATTERN.pattern}|(?i:submit_?jobs?)|MaxJobCount|[Tt]emporarily unavailable|Unable to create job record|"
    r"Rate limit exceeded|Invalid job array specification|(?i:job arrays? (?:is|are) not)"
)


class Submission(msgspec.Struct, kw_only=True):
    """A submission of several runs as one job, stored in .shardlab/submissions/TOKEN.json."""

    schema: Count = 1
    token: Token
    kind: SubmissionKind
    runs: list[RunId]
    """In the order of the array's tasks (kind `array`), or in the order in which they start (kind `pack`)."""
    script: Annotated[str, msgspec.Meta(pattern=r"^/")]
    options: list[SubmitOption]
    created_s: WallTime
    cluster: SlurmClusterName | None = None
    """The cluster of Slurm to which the job is sent; null: the default cluster."""
    state: Literal["intended", "sent", "refused"] = "intended"
    job: JobNumber | None = None
    why: str = ""

    def find_job_id(self, position: int) -> str | None:
        """Slurm's number of the job or array task that executes the run at this position in `runs`."""
        return f"{self.job}_{position}" if self.kind == "array" and self.job else self.job


class JobRefused(ShardlabError):
    """Raised if Slurm rejected the job and gave a reason. No job exists."""


class SlurmLimitReached(JobRefused):
    """Raised if Slurm rejected the job because of a limit. Slurm may accept the job later, or accept a smaller job now. why:
    Slurm's words."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def find_submissions_folder(workspace: Workspace) -> Path:
    """The folder of the workspace that contains the submission files."""
    return workspace.shardlab_folder / "submissions"


def make_token(token_prefix: str) -> str:
    """Make a name for a job that no other job has. The name is the token of the submission."""
    return f"{_NON_TOKEN_CHARACTER.sub('', token_prefix).lstrip('._-')[:80]}.{secrets.token_hex(5)}"


def record_intent(workspace: Workspace, submission: Submission) -> None:
    """Record the submission in the workspace before it is sent to Slurm. Raises WorkspaceError."""
    files.make_folder(find_submissions_folder(workspace))
    _write_submission(workspace, submission)
    for position, run_id in enumerate(submission.runs):
        _record_event(workspace, run_id, "submitting", **_describe_sending(submission, position))


def send_submission(workspace: Workspace, submission: Submission) -> None:
    """Send the job to Slurm so that it exists exactly once.

    Raises JobRefused, SlurmLimitReached, or ControllerUnreachable if it is not known whether Slurm accepted the job.
    """
    if (answer := _call_sbatch(workspace, submission)) is not None:
        _find_out_outcome(workspace, submission, answer)


def list_interrupted(workspace: Workspace) -> list[Submission]:
    """The submissions that were recorded as intended but not as sent, oldest first."""
    intended_submissions = [submission for submission in list_submissions(workspace) if submission.state == "intended"]
    return sorted(intended_submissions, key=lambda submission: submission.created_s)


def list_submissions(workspace: Workspace) -> list[Submission]:
    """Every submission of the workspace whose file can be read."""
    return [
        submission for path in _list_submission_files(workspace) if isinstance(submission := _read_submission(path), Submission)
    ]


def describe_damaged(workspace: Workspace) -> list[str]:
    """For each submission file that cannot be read, a sentence with the runs that are skipped because of it, and what to do."""
    return [_describe_damage_and_remedy(workspace, token, why) for token, why in find_unreadable(workspace).items()]


def find_unreadable(workspace: Workspace) -> dict[str, str]:
    """Why each submission file that is damaged cannot be read, by the token of the submission."""
    return {path.stem: why for path in _list_submission_files(workspace) if isinstance(why := _read_submission(path), str)}


def _list_submission_files(workspace: Workspace) -> list[Path]:
    return sorted(find_submissions_folder(workspace).glob("*.json"))


def _read_submission(path: Path) -> Submission | str | None:
    """Read a submission file. Returns the submission, or a sentence that says why the file cannot be read; None if another
    command has removed the file."""
    try:
        return msgspec.json.decode(files.read(path), type=Submission)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    except DECODE_FAULTS as error:
        return f"{path}: is not a submission of this version: {error}"


def _describe_damage_and_remedy(workspace: Workspace, token: str, damage: str) -> str:
    waiting_ids = [run.run_id for run in workspace.list_run_dirs() if _is_left_open(run, token)]
    if not waiting_ids:
        return f"{damage}. No run waits for this submission: remove the file."
    if len(waiting_ids) > MOST_NAMED_RUNS:
        id_groups = (waiting_ids[start : start + MOST_NAMED_RUNS] for start in range(0, len(waiting_ids), MOST_NAMED_RUNS))
        cancel_commands = "".join(f"\n  jobs cancel {' '.join(id_group)}" for id_group in id_groups)
        return (
            f"{damage}. It is not known whether Slurm accepted the job {token}, so its {len(waiting_ids):,} runs are set "
            f"aside: {waiting_ids[0]} and others. Restore the file; or withdraw the runs with these commands (a job that Slurm "
            "has for them then does nothing), remove the file, and send the runs again with `jobs retry --only cancelled`."
            f"{cancel_commands}"
        )
    ids_text = " ".join(waiting_ids)
    return (
        f"{damage}. It is not known whether Slurm accepted the job {token}, so these runs are set aside: "
        f"{ids_text}. Restore the file; or withdraw the runs with `jobs cancel {ids_text}` (a job that Slurm has for "
        "them then does nothing), remove the file, and send the runs again with `jobs retry --only cancelled`."
    )


def _is_left_open(run_dir: RunDir, token: str, *, is_unreadable: bool = False) -> bool:
    """Whether the run belongs to the submission with this token, and its events do not say whether Slurm accepted the job.

    is_unreadable: the result for a run whose records cannot be read; every command skips and reports such a run anyway.
    """
    try:
        last_sending = find_last_sending(run_dir.read_events(strict=True))
        is_open = last_sending is not None and last_sending.event == "submitting" and last_sending.data.get("token") == token
        return is_open and run_dir.judge().state not in FINAL_STATES
    except ShardlabError:
        return is_unreadable


def settle_submission(workspace: Workspace, submission: Submission) -> str:
    """Finish an interrupted submission; return a sentence on what was done. Raises JobRefused, SlurmLimitReached,
    ControllerUnreachable."""
    if _adopt_job(workspace, submission):
        return f"{submission.token}: Slurm had accepted this job as job {submission.job}; its number is recorded now."
    run_dirs = [RunDir(workspace.runs / run) for run in submission.runs]
    existing_folders = [folder for folder in run_dirs if folder.path.exists()]
    waiting_folders = [folder for folder in existing_folders if _is_left_open(folder, submission.token, is_unreadable=True)]
    if any(claim.is_claimed_by_job(folder) for folder in existing_folders):
        # The job has run and Slurm has forgotten the job. The records of the runs that the job started say how these runs
        # ended.
        unstarted_ids = [folder.run_id for folder in waiting_folders if not folder.claim.exists()]
        for run in unstarted_ids:
            why = f"Slurm no longer knows the job {submission.token}, which had not started this run"
            _record_event(workspace, run, "refused", sync=True, why=why, token=submission.token)
        submission.state, submission.why = "sent", "Slurm no longer knows its number"
        _write_submission(workspace, submission)
        note = f" {len(unstarted_ids)} of its runs had not started; `jobs submit` submits them again." if unstarted_ids else ""
        return f"{submission.token}: Slurm no longer knows this job; the records of the runs that it started are kept.{note}"
    if not existing_folders:
        _remove_files(workspace, submission)
        return f"{submission.token}: was not submitted, and the folders of its runs are gone; the submission is dropped."
    if not waiting_folders:
        _remove_files(workspace, submission)
        return f"{submission.token}: was not submitted, and none of its runs waits any more; the submission is dropped."
    send_submission(workspace, submission)
    return f"{submission.token}: Slurm did not have this job; it was submitted now as job {submission.job}."


def _find_out_outcome(workspace: Workspace, submission: Submission, output: SlurmOutput) -> None:
    """Handle an answer that does not say whether the job exists: look for the job as long as Slurm may still create it."""
    deadline = time.monotonic() + MESSAGE_TIMEOUTS * read_number_setting("MessageTimeout", 10, submission.cluster)
    while True:
        if _adopt_job(workspace, submission):
            return
        if time.monotonic() > deadline:
            break
        time.sleep(SEARCH_INTERVAL_S)
    if output.find_error_line(_BUSY_PATTERN) is not None:
        raise _record_refusal(workspace, submission, output)
    if _call_sbatch(workspace, submission) is not None:
        raise _make_unknown_outcome_error(submission, output.error_line)


def _call_sbatch(workspace: Workspace, submission: Submission) -> SlurmOutput | None:
    """Call sbatch. Returns None if Slurm created the job, or the output of sbatch if the output does not say whether the job
    exists. Raises JobRefused."""
    argv = ["sbatch", "--parsable", f"--job-name={submission.token}", *submission.options, submission.script]
    output = call_slurm(argv, cluster=submission.cluster, enough_pattern=_BUSY_PATTERN)
    if output.exit_code == 0 and (id_match := _JOB_ID_PATTERN.match(output.stdout.strip())):
        # sbatch prints the cluster only if a cluster was named. The user's own template may name another cluster.
        submission.cluster = id_match[2] or submission.cluster
        _record_sent(workspace, submission, id_match[1])
        return None
    if output.exit_code == 0 or query.is_unanswered(output):
        return output
    raise _record_refusal(workspace, submission, output)


def _adopt_job(workspace: Workspace, submission: Submission) -> bool:
    """Whether Slurm has a job with this token. If so, the job's number is recorded. Raises ControllerUnreachable."""
    try:
        jobs = query.find_jobs_by_name(submission.token, submission.created_s, submission.cluster)
    except ControllerUnreachable as outage:
        raise _make_unknown_outcome_error(submission, outage.why) from None
    if not jobs:
        return False
    _record_sent(workspace, submission, jobs[0].id.split("_")[0])
    return True


def _make_unknown_outcome_error(submission: Submission, why: str) -> ControllerUnreachable:
    """The error that is raised while it is unknown whether Slurm accepted the job. why: what Slurm's command printed."""
    run_count = len(submission.runs)
    runs_text = (
        submission.runs[0]
        if run_count == 1
        else f"{run_count} runs: {', '.join(submission.runs[:3])}{', ...' * (run_count > 3)}"
    )
    return ControllerUnreachable(
        why,
        f"It is not known whether Slurm accepted the job {submission.token} ({runs_text}); if it did, the job runs. "
        "When Slurm is back, `jobs submit` and `jobs retry` look for this job by its name first, and send it again "
        "only if Slurm does not have it.",
    )


def _record_sent(workspace: Workspace, submission: Submission, job_number: str) -> None:
    """Record the job's number in the events of its runs, then record the submission as sent. This order matters, because a
    submission that is recorded as sent is not examined again."""
    submission.state, submission.job = "sent", job_number
    for position, run_id in enumerate(submission.runs):
        _record_event(
            workspace,
            run_id,
            "submitted",
            **_describe_sending(submission, position),
            kind=submission.kind,
            job=submission.find_job_id(position),
        )
    _write_submission(workspace, submission)


def _describe_sending(submission: Submission, position: int) -> dict[str, Any]:
    """The data of the events `submitting` and `submitted` of the run at this position."""
    cluster = {} if submission.cluster is None else {"cluster": submission.cluster}
    return {"scheduler": "slurm", "token": submission.token, "position": position, **cluster}


def _record_refusal(workspace: Workspace, submission: Submission, output: SlurmOutput) -> JobRefused:
    limit_line = output.find_error_line(LIMIT_PATTERN)
    why = limit_line or output.error_line
    submission.state, submission.why = "refused", why
    _write_submission(workspace, submission)
    sentence = f"Slurm rejected the job because of a limit: {why}" if limit_line else f"Slurm rejected the job: {why}"
    for run_id in submission.runs:
        _record_event(workspace, run_id, "refused", sync=True, why=sentence, token=submission.token)
    # The submission file is removed, because the events of the runs record the refusal. Otherwise, a command that waits at a
    # limit for days would leave a file for each try.
    _remove_files(workspace, submission)
    sentence = f"Slurm rejected the job of {', '.join(submission.runs)}: {why.rstrip('.')}. {advise_on_rejection(why)}".rstrip()
    return SlurmLimitReached(why) if limit_line else JobRefused(sentence)


def _record_event(workspace: Workspace, run_id: str, event_kind: str, *, sync: bool = False, **data: Any) -> None:
    """Append an event to the events of a run, unless the folder of the run no longer exists."""
    run_dir = RunDir(workspace.runs / run_id)
    if run_dir.path.exists():
        run_dir.write_event("controller", event_kind, sync=sync, **data)


def _remove_files(workspace: Workspace, submission: Submission) -> None:
    shutil.rmtree(find_submissions_folder(workspace) / submission.token, ignore_errors=True)
    _make_submission_path(workspace, submission).unlink(missing_ok=True)


def _write_submission(workspace: Workspace, submission: Submission) -> None:
    files.write_json(_make_submission_path(workspace, submission), submission)
    workspace_trust.extend_consent(workspace, _make_submission_path(workspace, submission))


def _make_submission_path(workspace: Workspace, submission: Submission) -> Path:
    return find_submissions_folder(workspace) / f"{submission.token}.json"
