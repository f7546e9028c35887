"""What a scheduler does for the commands: take runs, tell what became of them, end them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import msgspec

from shardlab import registry
from shardlab.errors import ShardlabError
from shardlab.record import Event, Result
from shardlab.run import Run
from shardlab.rundir import RunDir
from shardlab.state import Verdict
from shardlab.workspace import Workspace


class Own(msgspec.Struct, frozen=True):
    """A run as its own folder tells it. result: of a run that has ended."""

    folder: RunDir
    run: Run
    events: list[Event]
    verdict: Verdict
    result: Result | None = None


class Seen(msgspec.Struct, frozen=True):
    """A run as its folder and its scheduler tell it together.

    id, raw: the scheduler's own number and words for the run's job. leftover: whether the scheduler still has the job to
    start although the run has ended.
    """

    verdict: Verdict
    id: str
    raw: str
    leftover: bool = False


class How(msgspec.Struct, frozen=True):
    """How runs are to be sent. at_once: at most so many at a time. pack: one allocation for all that ask for the same. after:
    runs that have to end before, in whatever way."""

    at_once: int | None = None
    pack: bool = False
    after: tuple[str, ...] = ()


class Full(ShardlabError):
    """A scheduler takes no more for now. left: the runs that it has not taken, in order; why: in its words."""

    def __init__(self, scheduler: str, why: str, left: Sequence[RunDir]) -> None:
        super().__init__(
            f"{scheduler} takes no more for now ({why}): {len(left)} run(s) are not sent. The same command sends them later; "
            "with --wait it does so by itself, as there is room."
        )
        self.left = list(left)
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

    def submit(self, workspace: Workspace, folders: Sequence[RunDir], how: How) -> None:
        """Send rendered runs, in order. Raises Full where it has room for some of them only, ShardlabError where it takes
        one not."""

    def resolve(self, workspace: Workspace) -> list[str]:
        """Finish what an earlier command began and did not end; sentences on what was found. Raises ShardlabError."""

    def observe(self, workspace: Workspace, runs: Sequence[Own]) -> list[Seen]:
        """What is true of each run; asks the scheduler once, whatever their number."""

    def cancel(self, workspace: Workspace, runs: Sequence[Own]) -> None:
        """End runs that wait or run; those that ended are left alone."""

    def cancel_jobs(self, jobs: Sequence[str]) -> str:
        """Cancel jobs by the scheduler's numbers; the scheduler's words if it did not, or ''."""

    def damaged(self, workspace: Workspace) -> list[str]:
        """A sentence for each record of this scheduler that cannot be read, with the runs that it sets aside."""

    def attend(self, workspace: Workspace) -> None:
        """Called now and then while somebody waits for runs."""


def scheduler(name: str) -> Scheduler:
    """The scheduler of this name. Raises UnknownName."""
    return cast(Scheduler, registry.load("jobs.schedulers", name, "scheduler"))


def apart(runs: Iterable[Own]) -> dict[str, list[Own]]:
    """Runs by the name of their scheduler."""
    found: dict[str, list[Own]] = {}
    for one in runs:
        found.setdefault(one.run.scheduler, []).append(one)
    return found
