"""The scheduler `local`: starts runs on this machine, one at a time, in the order of submission. So no run slows down
another."""

from __future__ import annotations

from collections.abc import Sequence

from jobs import run_queue
from jobs.run_queue import SCRIPT, RunQueue, cancel, cancel_jobs, damaged, hold, release, resolve
from jobs.scheduler import ObservedRun, RunOnDisk, SubmitOptions
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

__all__ = [
    "NAME", "POLL_S", "SCRIPT", "TEMPLATE", "TEMPLATES", "attend", "cancel", "cancel_jobs", "damaged", "hold", "observe",
    "release", "resolve", "submit",
]  # fmt: skip
NAME = "local"
TEMPLATE = "launch/local.sh.j2"
TEMPLATES = (TEMPLATE,)
POLL_S = 0.5


def submit(workspace: Workspace, folders: Sequence[RunDir], submit_options: SubmitOptions) -> None:
    """Submit runs, in this order, and start a runner if no runner is alive. `submit_options` is ignored: runs start one at a
    time."""
    RunQueue(NAME, workspace).submit(folders)


def attend(workspace: Workspace) -> None:
    """Start a runner if runs wait and no runner is alive, because the runner may have been killed."""
    RunQueue(NAME, workspace).attend()


def observe(workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
    """The state of each run, from its events and from the processes of this machine."""
    return RunQueue(NAME, workspace).observe(runs)


def work(workspace: Workspace) -> int:
    """The work of the runner: start the waiting runs one after another until no run waits; return the exit code. A workspace
    has only one runner at a time."""
    queue = RunQueue(NAME, workspace)
    return queue.work_off(queue.start_one_after_another)


if __name__ == "__main__":
    run_queue.run_as_runner(work)
