"""What is measured of a run while it trains, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardlab.cell import Cell
    from shardlab.rundir import RunDir
    from trainers.data.order import Order
    from trainers.instrument import Instrument
    from trainers.ranks import Company, Ranks
    from trainers.strategy import Engine
    from trainers.workload import Task


def chosen(
    cell: Cell,
    task: Task,
    engine: Engine,
    run_dir: RunDir,
    ranks: Ranks,
    company: Company,
    order: Order,
    *,
    meets: bool,
) -> list[Instrument]:
    """The instruments that a cell asks for, in the order in which they act after a step.

    meets: whether ranks may wait for each other before the last step.
    """
    found: list[Instrument] = []
    asked = cell.instruments
    if asked.validation is not None:
        from trainers.instruments.validation import Validator

        found.append(
            Validator(asked.validation, cell, task, engine, ranks, company, order, run_dir.validation_file, meets=meets)
        )
    return found
