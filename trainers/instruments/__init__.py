"""What is measured of a run while it trains, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlab.errors import InputError
from trainers import menu
from trainers.instruments import windows

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
    """The instruments that a cell asks for, in the order in which they act after a step.

    Raises InputError for one that this run cannot have.
    """
    steps = cell.steps if cell.steps is not None else (cell.epochs or 0) * steps_per_epoch
    for key, why in windows.refusals(cell, steps, cuda=ranks.device.type == "cuda"):
        raise InputError(f"{key}: {why}")
    found: list[Instrument] = []
    found += _memory(cell, engine, run_dir, ranks, company)
    found += _profile(cell, run_dir, ranks, company)
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
