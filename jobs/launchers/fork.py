"""CPU rehearsal: ranks forked from one warm parent that has imported everything, about a second a run."""

from __future__ import annotations

from jobs.launcher import Launcher
from shardlab.cell import Cell
from shardlab.run import Run


def refuse(cell: Cell) -> str | None:
    return "fork starts all ranks on one machine. Allowed: nnodes: 1." if cell.nnodes != 1 else None


def command(run: Run, python: str) -> list[str]:
    return [python, "-m", "trainers", "fork", "."]


LAUNCHER = Launcher(
    name="fork",
    summary="rehearsal on CPU: ranks forked from one warm parent, about a second a run",
    rehearsal=True,
    refuse=refuse,
    command=command,
)
