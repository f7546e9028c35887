"""The interface of a scheduler: it accepts runs, reports their states and cancels them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import msgspec

from shardlab import registry
from shardlab.errors import ShardlabError
from shardlab.record import Event, Result
from shardlab.run import Run
from shardlab.rundir import RunDir
from shardlab.state import JudgedState
from shardlab.workspace import Workspace


class RunOnDisk(msgspec.Struct, frozen=True):
    """A run as read from its own folder. result: the result of a run that has ended."""

    folder: RunDir
    run: Run
    events: list[Event]
    verdict: JudgedState
    result: Result | None = None


class ObservedRun(msgspec.Struct, frozen=True):
    """The state of a run, from its folder and its scheduler together.

    id, raw: the scheduler's own number and words for the run's job. leftover: whether the scheduler still has the job to
    start although the run has ended. unanswered: the scheduler could not be asked, so the verdict is from the folder alone.
    """

    verdict: JudgedState
    id: str
    raw: str
    leftover: bool = False
    unanswered: bool = False


class SubmitOptions(msgspec.Struct, frozen=True):
    """How runs are submitted.

    at_once: the largest number of runs at a time. pack: one allocation for all runs with the same sbatch options. after: runs
    that must have ended before, in any state.
    """

    at_once: int | None = None
    pack: bool = False
    after: tuple[str, ...] = ()


class Full(ShardlabError):
    """A scheduler accepts no more jobs for now. unsubmitted: the runs that it did not accept, in order. why: its words."""

    def __init__(self, scheduler: str, why: str, unsubmitted: Sequence[RunDir]) -> None:
        super().__init__(
            f"{scheduler} accepts no more jobs for now ({why}): {len(unsubmitted)} run(s) are not submitted. Run the command "
            "again later; with --wait, the command itself submits them when there is room."
        )
        self.unsubmitted = list(unsubmitted)
        self.why = why


class Scheduler(Protocol):
    """A file of jobs/schedulers.

    TEMPLATE: the template of the script of one run. TEMPLATES: TEMPLATE, and those of every other script that is sent to this
    scheduler. SCRIPT: the name of the script in the run's folder. POLL_S: the seconds between two questions to the scheduler.
    """

    NAME: str
    TEMPLATE: str
    TEMPLATES: tuple[str, ...]
    SCRIPT: str
    POLL_S: float

    def submit(self, workspace: Workspace, folders: Sequence[RunDir], how: SubmitOptions) -> None:
        """Submit rendered runs, in order. Raises Full if the scheduler accepts only some of them for now, ShardlabError if it
        rejects a run."""

    def resolve(self, workspace: Workspace) -> list[str]:
        """Finish interrupted submissions of earlier commands; return a sentence on each. Raises ShardlabError."""

    def observe(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
        """The state of each run; asks the scheduler once for all runs."""

    def cancel(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> None:
        """Cancel runs that wait or run; runs that have ended stay as they are."""

    def cancel_jobs(self, jobs: Sequence[str]) -> str:
        """Cancel jobs by the scheduler's numbers; the scheduler's words if it did not, or ''."""

    def hold(self, jobs: Sequence[str]) -> str:
        """Keep jobs from starting, and requeue the job of this process, held too: in Slurm, this ends the process.

        Returns the scheduler's words if it did not requeue the job, or ''."""

    def release(self, jobs: Sequence[str]) -> None:
        """Let held jobs start. Raises ShardlabError."""

    def damaged(self, workspace: Workspace) -> list[str]:
        """A sentence for each record of this scheduler that cannot be read, with the runs that it sets aside."""

    def attend(self, workspace: Workspace) -> None:
        """Called from time to time while a command waits for runs."""


def scheduler(name: str) -> Scheduler:
    """The scheduler of this name. Raises UnknownName."""
    return cast(Scheduler, registry.load("jobs.schedulers", name, "scheduler"))


def apart(runs: Iterable[RunOnDisk]) -> dict[str, list[RunOnDisk]]:
    """Runs by the name of their scheduler."""
    by_scheduler: dict[str, list[RunOnDisk]] = {}
    for run in runs:
        by_scheduler.setdefault(run.run.scheduler, []).append(run)
    return by_scheduler
