"""What is measured of a run while it trains, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardlab.cell import Cell
    from shardlab.rundir import RunDir
    from trainers.instrument import Instrument
    from trainers.ranks import Company, Ranks
    from trainers.strategy import Engine
    from trainers.workload import Task


def chosen(
    cell: Cell, task: Task, engine: Engine, run_dir: RunDir, ranks: Ranks, company: Company, steps_per_epoch: int
) -> list[Instrument]:
    """The instruments that a cell asks for, in the order in which they act after a step."""
    return []
