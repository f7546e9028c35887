"""Slurm jobs by which `provision` does work at a site that must not run on a login node, such as an installation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import msgspec

from provision.fact import Unanswered
from provision.node import Node, find_error_line
from provision.operation import RunCommand
from provision.site import requests
from shardlab.cluster import slurm_waiting
from shardlab.cluster.sbatch_request import advise_on_rejection
from shardlab.remote.remote import Unreachable
from shardlab.terminal.console import Output

JOB_NAME = "shardlab-provision"  # the name of these jobs
LISTING_NAME = "shardlab-packages"  # the name of jobs that list the packages of a container image
ASK_S = 30.0  # seconds between two questions why a job waits
# Submits the script $1 and waits for the job. If the job failed, prints the last line of its log $2 as the reason.
SUBMIT_AND_WAIT = f"""\
{requests.WITHOUT_VARIABLES}
rm -f -- "$2"
sbatch --wait --parsable "$1" || {{ test ! -s "$2" || echo "$(tail -n 1 "$2") (see $2)" >&2; exit 1; }}
"""
# Prints a job that waits or runs with the script $1, as JOB|STATE|REASON. A second job would write to the same folder.
LIST_WAITING_JOBS = f"""\
{requests.WITHOUT_VARIABLES}
jobs=$(squeue --noheader --user "$(id -un)" --name {JOB_NAME},{LISTING_NAME} --format '%i|%T|%r|%o') || exit 1
printf '%s\\n' "$jobs" | while IFS='|' read -r job state reason script; do
    test "$script" != "$1" || printf '%s|%s|%s\\n' "$job" "$state" "$reason"
done
"""


class SubmitScript(RunCommand, frozen=True):
    """A change by a job. While the job waits in the queue, the reason is printed. If Slurm rejects the job, the error names the
    keys of the cluster file that decide its request."""

    def make(self, node: Node) -> None:
        script_path = self.argv[-2]
        try:
            with say_why_job_waits(node, script_path, self.description):
                super().make(node)
        except Unanswered as error:
            rejection_advice = advise_on_rejection(str(error)) if "sbatch: error:" in str(error) else ""
            error_sentence = f"{str(error).rstrip('.')}. {rejection_advice}" if rejection_advice else str(error)
            raise Unanswered(error_sentence, dict.fromkeys(error.reasons_by_node, error_sentence)) from None


def make_script_submission(description: str, script_path: str, log_path: str, limit_s: float) -> RunCommand:
    """The change that submits a script as a job and waits until the job ends. log_path: the path of the job's log."""
    return SubmitScript(description, ["sh", "-c", SUBMIT_AND_WAIT, "submit", script_path, log_path], limit_s, root=False)


class _ScriptJob(msgspec.Struct, frozen=True):
    """A job that waits or runs."""

    job_id: str
    state: str
    """The state in the words of Slurm."""
    waiting_reason: str
    """Why the job waits; '' if it runs, or if Slurm has given no reason yet."""

    def describe(self) -> str:
        """The job in words, such as `7 (PENDING: Priority)`."""
        return f"{self.job_id} ({self.state}{f': {self.waiting_reason}' if self.waiting_reason else ''})"


@contextlib.contextmanager
def say_why_job_waits(node: Node, script_path: str, work_phrase: str) -> Iterator[None]:
    """During the block, which waits for the job of a script, print why the job waits in the queue, each reason once.

    script_path: the path of the script. work_phrase: what the job does, for the message.
    """
    has_ended = threading.Event()

    def print_new_reasons() -> None:
        printed_job = None
        while not has_ended.wait(ASK_S):
            with contextlib.suppress(Unanswered, Unreachable):
                job = _find_job(node, script_path)
                if job is not None and job.waiting_reason and job != printed_job and not has_ended.is_set():
                    Output().print_remark(f"{node.name}: {work_phrase}: waits for job {job.describe()}")
                    printed_job = job

    asking_thread = threading.Thread(target=print_new_reasons, daemon=True)
    asking_thread.start()
    try:
        yield
    finally:
        has_ended.set()
        asking_thread.join()


def check_no_waiting_job(node: Node, script_path: str, work_phrase: str) -> None:
    """Check that no job of an earlier command with this script still waits or runs. Raises Unanswered if there is one.

    script_path: the path of the script. work_phrase: what the job does, as a clause for the error.
    """
    if (job := _find_job(node, script_path)) is not None:
        raise Unanswered(
            f"{node.name}: job {job.describe()} of an earlier command {work_phrase}. When the job has ended, run the same "
            "command again."
        )


def _find_job(node: Node, script_path: str) -> _ScriptJob | None:
    """The job with this script that waits or runs; None if there is none. Raises Unanswered."""
    squeue_output = node.run(["sh", "-c", LIST_WAITING_JOBS, "waiting", script_path], timeout_s=60)
    if squeue_output.code != 0:
        raise Unanswered(f"{node.name}: squeue does not say which jobs wait: {find_error_line(squeue_output)}")
    if not (job_lines := squeue_output.stdout.splitlines()):
        return None
    job_id, state, reason = job_lines[0].split("|", 2)
    # Slurm gives the reason None until it has looked at a new job.
    is_explained = state == "PENDING" and reason != "None"
    waiting_reason = slurm_waiting.explain_waiting(reason, slurm_waiting.FOR_PROVISION) or reason
    return _ScriptJob(job_id, state, waiting_reason if is_explained else "")
