"""Slurm jobs by which `provision` does work at a site that must not run on a login node, such as an installation."""

from __future__ import annotations

from provision.fact import Unanswered
from provision.node import Node, last_line
from provision.operation import RunCommand
from provision.site import requests
from shardlab.cluster.sbatch_request import advise_on_rejection

JOB_NAME = "shardlab-provision"  # the name of these jobs
# Submits the script $1 and waits for the job. If the job failed, prints the last line of its log $2 as the reason.
SUBMIT_AND_WAIT = f"""\
{requests.WITHOUT_VARIABLES}
rm -f -- "$2"
sbatch --wait --parsable "$1" || {{ test ! -s "$2" || echo "$(tail -n 1 "$2") (see $2)" >&2; exit 1; }}
"""
# Prints a job that waits or runs with the script $1. A second job with this script would write to the same folder.
LIST_WAITING_JOBS = f"""\
{requests.WITHOUT_VARIABLES}
jobs=$(squeue --noheader --user "$(id -un)" --name {JOB_NAME} --format '%i %T %o') || exit 1
printf '%s\\n' "$jobs" | while read -r job state script; do
    test "$script" != "$1" || printf '%s (%s)\\n' "$job" "$state"
done
"""


class SubmitScript(RunCommand, frozen=True):
    """A change by a job. If Slurm rejects the job, the error names the keys of the cluster file that decide its request."""

    def make(self, node: Node) -> None:
        try:
            super().make(node)
        except Unanswered as error:
            rejection_advice = advise_on_rejection(str(error)) if "sbatch: error:" in str(error) else ""
            error_sentence = f"{str(error).rstrip('.')}. {rejection_advice}" if rejection_advice else str(error)
            raise Unanswered(error_sentence, dict.fromkeys(error.reasons_by_node, error_sentence)) from None


def submit_script(description: str, script_path: str, log_path: str, limit_s: float) -> RunCommand:
    """The change that submits a script as a job and waits until the job ends. log: the path of the job's log."""
    return SubmitScript(description, ["sh", "-c", SUBMIT_AND_WAIT, "submit", script_path, log_path], limit_s, root=False)


def check_no_waiting_job(node: Node, script_path: str, work_phrase: str) -> None:
    """Check that no job of an earlier command with this script still waits or runs. Raises Unanswered if there is one.

    work: what the job does, as a clause for the error.
    """
    squeue_output = node.run(["sh", "-c", LIST_WAITING_JOBS, "waiting", script_path], timeout_s=60)
    if squeue_output.code != 0:
        raise Unanswered(f"{node.name}: squeue does not say which jobs wait: {last_line(squeue_output)}")
    if job := squeue_output.stdout.strip():
        raise Unanswered(
            f"{node.name}: job {job} of an earlier command {work_phrase}. When the job has ended, run the same command again."
        )
