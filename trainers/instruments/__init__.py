"""The instruments: measurements of a run while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlab.errors import InputError
from trainers import menu
from trainers.instruments import windows

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

    meets: whether ranks may wait for each other before the last step. Raises InputError if this run cannot have an instrument.
    """
    for key, why in windows.refusals(cell, order.timed_steps(cell), cuda=ranks.device.type == "cuda"):
        raise InputError(f"{key}: {why}")
    found: list[Instrument] = []
    found += _memory(cell, engine, run_dir, ranks, company)
    found += _profile(cell, run_dir, ranks, company)
    if cell.instruments.validation is not None:
        from trainers.instruments.validation import Validator

        path = run_dir.validation_file
        found.append(Validator(cell.instruments.validation, cell, task, engine, ranks, company, order, path, meets=meets))
    return found


def _memory(cell: Cell, engine: Engine, run_dir: RunDir, ranks: Ranks, company: Company) -> list[Instrument]:
    step = windows.memory_step(cell)
    if cell.instruments.memory == "categories":
        from trainers.instruments.categories import MemoryCategories

        path = run_dir.memory_file(ranks.rank)
        return [MemoryCategories(cell, menu.strategy(cell.strategy), engine, path, step, ranks, company)]
    if cell.instruments.memory == "snapshot":
        from trainers.instruments.snapshot import MemorySnapshot

        return [MemorySnapshot(run_dir.snapshot_file(ranks.rank), step, ranks, company)]
    return []


def _profile(cell: Cell, run_dir: RunDir, ranks: Ranks, company: Company) -> list[Instrument]:
    if cell.instruments.profile is None:
        return []
    from trainers.instruments.profiling import Profiler

    return [Profiler(cell.instruments.profile, run_dir.trace_file(ranks.rank), ranks, company)]
