"""CPU rehearsal: ranks forked from one warm parent that has imported everything, about a second a run."""

from __future__ import annotations

from jobs.launcher import Launcher
from shardlab.run import Run


def command(run: Run, python: str) -> list[str]:
    return [python, "-m", "trainers", "fork", "."]


LAUNCHER = Launcher(
    name="fork",
    summary="rehearsal on CPU: ranks forked from one warm parent, about a second a run",
    rehearsal=True,
    several_nodes=False,
    command=command,
    task=command,
)
