"""The scheduler `local`: starts runs on this machine one at a time, in order of submission, so that none disturbs another."""

from __future__ import annotations

from collections.abc import Sequence

from jobs import run_queue
from jobs.run_queue import SCRIPT, RunQueue, cancel, cancel_jobs, damaged, hold, release, resolve
from jobs.scheduler import ObservedRun, RunOnDisk, SubmitOptions
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace

__all__ = [
    "NAME", "POLL_S", "SCRIPT", "TEMPLATE", "TEMPLATES", "attend", "cancel", "cancel_jobs", "damaged", "hold", "observe",
    "release", "resolve", "submit",
]  # fmt: skip
NAME = "local"
TEMPLATE = "launch/local.sh.j2"
TEMPLATES = (TEMPLATE,)
POLL_S = 0.5


def submit(workspace: Workspace, folders: Sequence[RunDir], how: SubmitOptions) -> None:
    """Submit runs, in order, and start a runner if none is alive. The runs start one at a time, whatever `how` says."""
    RunQueue(NAME, workspace).submit(folders)


def attend(workspace: Workspace) -> None:
    """Start a runner if runs wait and no runner is alive: somebody may have killed it."""
    RunQueue(NAME, workspace).attend()


def observe(workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
    """From the runs' events and the processes of this machine."""
    return RunQueue(NAME, workspace).observe(runs)


def work(workspace: Workspace) -> int:
    """The runner: until no run waits, wait for the running run, then start the next. There is one runner per workspace."""
    queue = RunQueue(NAME, workspace)
    return queue.work_off(queue.start_one_after_another)


if __name__ == "__main__":
    run_queue.run_as_runner(work)
