"""The launcher `fork`, a rehearsal on CPU: forks the ranks from a process that has imported everything; a run takes seconds."""

from __future__ import annotations

from jobs.launcher import Launcher
from shardlab.run import Run


def command(run: Run, python: str) -> list[str]:
    """The words that start all ranks of a run on one node."""
    return [python, "-m", "trainers", "fork", "."]


LAUNCHER = Launcher(
    name="fork",
    summary="rehearsal on CPU: ranks are forked from one process that has imported everything, so a run takes about a second",
    rehearsal=True,
    several_nodes=False,
    command=command,
    task=command,
)
