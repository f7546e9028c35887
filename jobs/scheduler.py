"""The interface of a scheduler: it accepts runs, reports their states and cancels them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec

from shardlab import registry
from shardlab.errors import ShardlabError
from shardlab.runs.record import Event, Result
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import JudgedState
from shardlab.workspace.workspace import Workspace


class RunOnDisk(msgspec.Struct, frozen=True):
    """A run as read from its folder, without asking its scheduler."""

    run_dir: RunDir
    run: Run
    events: list[Event]
    verdict: JudgedState
    """The state by the records in the folder."""
    result: Result | None = None
    """The result of a run that has ended."""


class ObservedRun(msgspec.Struct, frozen=True):
    """The state of a run, from the records in its folder and from its scheduler."""

    verdict: JudgedState
    """The state."""
    job_id: str
    """The scheduler's number of the run's job."""
    scheduler_words: str
    """The scheduler's own words for the state of the job."""
    is_leftover: bool = False
    """Whether the job is still in the scheduler's queue although the run has ended."""
    is_unanswered: bool = False
    """Whether the scheduler could not be asked; the verdict then comes from the folder alone."""


class SubmitOptions(msgspec.Struct, frozen=True):
    """The options with which runs are submitted."""

    most_runs: int | None = None
    """The largest number of runs at a time; None: no limit."""
    is_packed: bool = False
    """Whether all runs with the same sbatch options share one allocation."""
    run_ids_before: tuple[str, ...] = ()
    """The ids of the runs that must have ended, in any state, before these runs start."""
    ignore_lease: bool = False
    """Whether runs that would not end before the lease of the nodes are also submitted; otherwise, they are held back."""


class SchedulerFull(ShardlabError):
    """Raised if a scheduler accepts no more jobs for now.

    unsubmitted: the runs that the scheduler did not accept, in order. why: the reason in the scheduler's words.
    """

    def __init__(self, scheduler: str, why: str, unsubmitted: Sequence[RunDir]) -> None:
        super().__init__(
            f"{scheduler} accepts no more jobs for now ({why}): {len(unsubmitted)} run(s) are not submitted. Run the command "
            "again later; with --wait, the command itself submits them when there is room."
        )
        self.unsubmitted = list(unsubmitted)
        self.why = why


class Scheduler(ABC):
    """The interface of a scheduler. Each module in jobs/schedulers has a scheduler, SCHEDULER. By default, a scheduler has
    nothing to finish, to hold or to start again."""

    NAME: str
    """The name of the scheduler."""
    TEMPLATE: str
    """The template of the script of one run."""
    TEMPLATES: tuple[str, ...]
    """TEMPLATE, and the templates of all other scripts that are sent to this scheduler."""
    SCRIPT: str
    """The name of the script in the run's folder."""
    POLL_S: float
    """The seconds between two questions to the scheduler."""

    @abstractmethod
    def submit(self, workspace: Workspace, run_dirs: Sequence[RunDir], submit_options: SubmitOptions) -> None:
        """Submit rendered runs, in this order. Raises SchedulerFull if the scheduler accepts only some of the runs for now,
        ShardlabError if the scheduler rejects a run."""

    def finish_interrupted(self, workspace: Workspace) -> list[str]:
        """Finish submissions of earlier commands that were interrupted; return a sentence about each. Raises ShardlabError."""
        return []

    @abstractmethod
    def observe(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
        """The state of each run, in the order of `runs`. The scheduler is asked only once for all runs."""

    @abstractmethod
    def cancel(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> None:
        """Cancel runs that wait or run. Runs that have ended are not changed."""

    def cancel_jobs(self, job_ids: Sequence[str]) -> str:
        """Cancel jobs by the scheduler's numbers. Returns '', or the scheduler's words if the scheduler did not cancel the
        jobs."""
        return ""

    def hold_jobs(self, token_by_job: Mapping[str, str]) -> str:
        """Hold pending jobs, given as {number: token of the submission}, so that they do not start, and requeue the job of this
        process as a held job.

        In Slurm, the requeue ends this process. Returns '', or the scheduler's words if the scheduler did not requeue the
        job."""
        return ""

    def release_jobs(self, token_by_job: Mapping[str, str]) -> None:  # noqa: B027 - by default, nothing is held
        """Let held jobs start, given as for `hold`. Raises ShardlabError."""

    def describe_damaged_records(self, workspace: Workspace) -> list[str]:
        """A sentence for each record of this scheduler that cannot be read, with the runs that are skipped because of it."""
        return []

    def restart_lost_runner(self, workspace: Workspace) -> None:  # noqa: B027 - by default, there is no runner
        """Called from time to time while a command waits for runs: starts a new runner if the runner of the queue is gone."""


def find_scheduler(scheduler_name: str) -> Scheduler:
    """The scheduler with this name. Raises UnknownName."""
    return cast(Scheduler, registry.load_plugin("jobs.schedulers", scheduler_name, "scheduler").SCHEDULER)


def group_by_scheduler(runs: Iterable[RunOnDisk]) -> dict[str, list[RunOnDisk]]:
    """Group runs by their scheduler. Returns the runs of each scheduler, by the name of the scheduler."""
    runs_by_scheduler: dict[str, list[RunOnDisk]] = {}
    for run_on_disk in runs:
        runs_by_scheduler.setdefault(run_on_disk.run.scheduler, []).append(run_on_disk)
    return runs_by_scheduler
