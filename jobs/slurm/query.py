"""Asks Slurm for the states of any number of jobs with one command: squeue while a job may wait or run, otherwise sacct.

The other of the two commands is called only if the first answer does not tell the state of every job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import msgspec

from jobs.slurm import states
from jobs.slurm.commands import ControllerUnreachable, SlurmOutput, call_slurm, read_own_cluster
from shardlab.runs.state import name_job

# The columns that sacct and squeue print: the same columns in the same order, so that one parser reads both outputs.
SACCT_FIELDS = ("JobID", "JobName", "State", "Submit", "Start", "NodeList", "Reason")
SQUEUE_FORMAT = "%i|%j|%T|%V|%S|%N|%r"
MOST_JOBS_PER_COMMAND = 500  # the most jobs that one command names
ACCOUNTING_DISABLED = "accounting storage is disabled"  # sacct's words if Slurm keeps no accounting
_TASKS_PATTERN = re.compile(r"^(\d+)_\[([^%\]]+)(?:%\d+)?\]\Z")
_RANGE_PATTERN = re.compile(r"^(\d+)(?:-(\d+))?(?::(\d+))?\Z")
_PREEMPTED_PATTERN = re.compile(r"\bPreemptTime=\d")  # a job that is not preempted has PreemptTime=None
# The words of Slurm's commands if the controller is away, or if its answer did not arrive or could not be read. In these cases,
# sbatch may have created a job. (From slurm_errno.c of Slurm 21.08 to 25.11.)
_NO_ANSWER_PATTERN = re.compile(
    r"(?i)unable to contact|connection|connect failure|communication|timed out|timeout|zero bytes|transport|transmit|"
    r"unexpected message|message (?:send|receive) failure|message length|header lengths|authentication error|socket error|"
    r"standby mode|shutting down"
)


class Job(msgspec.Struct, frozen=True):
    """A job, or a task of a job array, as Slurm lists it."""

    id: str
    """Such as 12, or 12_3 for a task."""
    name: str
    state: str
    reason: str
    submit_s: float | None
    """The time of the submission, in seconds since the epoch."""
    start_s: float | None
    """The time of the last start, in seconds since the epoch."""
    node_list: str
    """In Slurm's notation."""


class JobsFound(msgspec.Struct, frozen=True):
    """Slurm's answer about several jobs."""

    jobs: dict[str, Job]
    """The jobs that were found, by id."""
    no_answer_reason: str
    """Why Slurm's controller could not be asked, or ''."""
    accounting_error: str = ""
    """Why Slurm's accounting did not answer, so that only the controller has said which jobs it knows; or ''."""
    has_accounting: bool = False
    """Whether the accounting has said which jobs it knows; without accounting, Slurm soon forgets ended jobs."""

    @property
    def complete(self) -> bool:
        """Whether it is certain that Slurm does not know the jobs that are missing in `jobs`."""
        return not (self.no_answer_reason or self.accounting_error)


def find_jobs(
    job_numbers: Sequence[str], since_s: float, unfinished_ids: Set[str] = frozenset(), cluster: str | None = None
) -> JobsFound:
    """The latest state of each of these jobs of a cluster, and of each task of a job array.

    job_numbers: numbers of jobs; an array has one number. since_s: no job was submitted before this time. unfinished_ids: ids
    of jobs that may wait or run. The accounting lags behind for such jobs, so the controller (squeue) is asked first; if the
    controller knows all these jobs, sacct is not called. cluster: as in `call_slurm`."""
    if not job_numbers:
        return JobsFound({}, "")
    squeue_output = _call_squeue(cluster) if unfinished_ids else None
    if (
        squeue_output is not None
        and squeue_output.exit_code == 0
        and unfinished_ids <= (listed_jobs := _parse_listed_jobs(squeue_output, job_numbers)).keys()
    ):
        return JobsFound(listed_jobs, "")
    sacct_output = call_slurm([*_make_sacct_argv(since_s), f"--jobs={','.join(job_numbers)}"], cluster=cluster)
    jobs_by_id = {job.id: job for job in _parse_jobs(sacct_output.stdout)} if sacct_output.exit_code == 0 else {}
    unknown_numbers = {
        number for number in job_numbers if not any(job.startswith(f"{number}_") or job == number for job in jobs_by_id)
    }
    has_unsettled_job = not all(states.is_settled(job.state) for job in jobs_by_id.values())
    if squeue_output is None and sacct_output.exit_code == 0 and not unknown_numbers and not has_unsettled_job:
        return JobsFound(jobs_by_id, "")
    # The accounting lags by seconds behind a start or an end of a job, and does not say what a job waits for.
    squeue_output = squeue_output or _call_squeue(cluster)
    if squeue_output.exit_code != 0:
        return JobsFound(jobs_by_id, squeue_output.error_line)
    jobs_by_id |= _parse_listed_jobs(squeue_output, job_numbers)
    # If Slurm keeps no accounting, the controller's list is complete: it has all jobs, and ended jobs for MinJobAge seconds.
    # Before Slurm 23.11.4, sacct may return exit code 0 although it prints an error.
    is_accounting_complete = sacct_output.exit_code == 0 and "error:" not in sacct_output.stderr
    has_answered = is_accounting_complete or ACCOUNTING_DISABLED in sacct_output.stderr
    return JobsFound(jobs_by_id, "", "" if has_answered else sacct_output.error_line, is_accounting_complete)


def find_jobs_by_name(job_name: str, since_s: float, cluster: str | None) -> list[Job]:
    """The jobs with this name that the controller or the accounting of a cluster lists. cluster: as in `call_slurm`. Raises
    ControllerUnreachable."""
    squeue_output = call_slurm(
        ["squeue", "-h", "--me", "--states=all", f"--name={job_name}", f"--format={SQUEUE_FORMAT}"], cluster=cluster
    )
    if squeue_output.exit_code != 0:
        raise ControllerUnreachable(squeue_output.error_line, f"It is not known whether Slurm has a job named {job_name}.")
    jobs_by_number = {job.id.split("_")[0]: job for job in _parse_jobs(squeue_output.stdout) if job.name == job_name}
    sacct_output = call_slurm([*_make_sacct_argv(since_s), f"--name={job_name}"], cluster=cluster)
    if sacct_output.exit_code == 0:
        jobs_by_number |= {job.id.split("_")[0]: job for job in _parse_jobs(sacct_output.stdout) if job.name == job_name}
    return list(jobs_by_number.values())


def select_own_jobs(token_by_job: Mapping[str, str]) -> list[tuple[str | None, Sequence[str]]]:
    """Those of these jobs that Slurm lists under the name that we gave them, as `split_by_command` returns them. Raises
    ControllerUnreachable.

    A number from a record is not enough to cancel, hold or release a job, or to wait for it: Slurm gives numbers again, and the
    author of an archive can write any number. token_by_job: a job or a task of an array, as `find_sent_job` names it -> token,
    which is the job's name."""
    name_by_own_job: dict[str, str] = {}
    for cluster, job_numbers in _group_by_cluster(token_by_job).items():
        for job_names in _split_into_parts(sorted({token_by_job[name_job(number, cluster)] for number in job_numbers})):
            squeue_output = _call_squeue(cluster, f"--name={','.join(job_names)}")
            if squeue_output.exit_code != 0:
                raise ControllerUnreachable(
                    squeue_output.error_line, "No job was changed; run the command again when Slurm is back."
                )
            name_by_own_job |= {name_job(job.id, cluster): job.name for job in _parse_jobs(squeue_output.stdout)}
    return split_by_command([job for job, token in token_by_job.items() if name_by_own_job.get(job) == token])


def split_by_command(job_names: Iterable[str]) -> list[tuple[str | None, Sequence[str]]]:
    """Jobs, as `find_sent_job` names them, in groups for one command each: (the cluster as in `call_slurm`, the numbers of
    at most MOST_JOBS_PER_COMMAND jobs of this cluster)."""
    return [
        (cluster, numbers_of_command)
        for cluster, job_numbers in _group_by_cluster(job_names).items()
        for numbers_of_command in _split_into_parts(job_numbers)
    ]


def _group_by_cluster(job_names: Iterable[str]) -> dict[str | None, list[str]]:
    """The numbers of the jobs of each cluster."""
    numbers_by_cluster: dict[str | None, list[str]] = {}
    for job_name in job_names:
        cluster, _, number = job_name.rpartition(":")
        numbers_by_cluster.setdefault(cluster or None, []).append(number)
    return numbers_by_cluster


def is_preempted(job_id: str) -> bool:
    """Whether Slurm is preempting this running job. A preempted job that gets time to end first receives only a signal, which
    does not tell the reason."""
    return bool(_PREEMPTED_PATTERN.search(call_slurm(["scontrol", "show", "job", job_id], cluster=read_own_cluster()).stdout))


def _split_into_parts(job_names: Sequence[str]) -> list[Sequence[str]]:
    """Numbers or names of jobs, in parts of at most MOST_JOBS_PER_COMMAND jobs."""
    return [job_names[begin : begin + MOST_JOBS_PER_COMMAND] for begin in range(0, len(job_names), MOST_JOBS_PER_COMMAND)]


def _call_squeue(cluster: str | None, *options: str) -> SlurmOutput:
    return call_slurm(["squeue", "-h", "-r", "--me", "--states=all", *options, f"--format={SQUEUE_FORMAT}"], cluster=cluster)


def _parse_listed_jobs(squeue_output: SlurmOutput, listed_numbers: Sequence[str]) -> dict[str, Job]:
    job_numbers = set(listed_numbers)
    return {job.id: job for job in _parse_jobs(squeue_output.stdout) if job.id.split("_")[0] in job_numbers}


def is_unanswered(output: SlurmOutput) -> bool:
    """Whether Slurm's controller did not answer the command, so that it is not known what Slurm did."""
    return output.exit_code is None or bool(_NO_ANSWER_PATTERN.search(output.stderr))


def _make_sacct_argv(since_s: float) -> list[str]:
    # a day earlier, because clocks differ and Slurm reads the time in its own time zone
    earliest_s = max(0, int(since_s) - 86400)
    start_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(earliest_s))
    return ["sacct", "-X", "-P", "-n", f"--starttime={start_text}", f"--format={','.join(SACCT_FIELDS)}"]


def _parse_jobs(table_text: str) -> Iterator[Job]:
    """Parse the output of sacct or squeue. If a job is listed twice, the entry that counts comes last.

    Of two arrays with the same number (before 23.11 sacct lists both), the later array counts. If a task is listed alone and
    also in a range of tasks, the entry of the task alone counts: sacct removes the task from the range a little later.
    """
    table_rows = [columns for line in table_text.splitlines() if len(columns := line.split("|")) == len(SACCT_FIELDS)]
    table_rows.sort(key=lambda columns: (_parse_time(columns[3]) or 0.0, "[" not in columns[0]))
    for job_text, name, state, submit_text, start_text, nodes, reason in table_rows:
        for job_id in _expand_tasks(job_text):
            yield Job(
                id=job_id,
                name=name,
                state=state,
                reason="" if reason == "None" else reason,
                submit_s=_parse_time(submit_text),
                start_s=_parse_time(start_text),
                node_list="" if nodes == "None assigned" else nodes,
            )


def _parse_time(time_text: str) -> float | None:
    return float(time_text) if time_text.isdigit() else None


def _expand_tasks(job_text: str) -> Iterable[str]:
    """Expand a range of tasks: 12_[3-5,7%2] to 12_3, 12_4, 12_5, 12_7, and 12_[0-4:2] to 12_0, 12_2, 12_4."""
    tasks_match = _TASKS_PATTERN.match(job_text)
    if not tasks_match:
        return [job_text]
    range_matches = [range_match for range_match in map(_RANGE_PATTERN.match, tasks_match[2].split(",")) if range_match]
    return [
        f"{tasks_match[1]}_{task_number}"
        for range_match in range_matches
        for task_number in range(int(range_match[1]), int(range_match[2] or range_match[1]) + 1, int(range_match[3] or 1))
    ]
