"""Creates the instruments that a cell asks for, except checkpoints and the lost worker, which the training loop creates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlab.errors import InputError
from trainers import menu
from trainers.instruments import observed_steps
from trainers.instruments.memory_categories import MemoryCategories
from trainers.instruments.profiling import Profiler
from trainers.instruments.snapshot import MemorySnapshot
from trainers.instruments.validation import Validator

if TYPE_CHECKING:
    from shardlab.matrix.cell import Cell
    from shardlab.runs.rundir import RunDir
    from trainers.data.order import DataOrder
    from trainers.engine import Engine
    from trainers.instrument import Instrument
    from trainers.ranks.ranks import Peers, Ranks
    from trainers.task import Task


def create_instruments(
    cell: Cell, task: Task, engine: Engine, run_dir: RunDir, ranks: Ranks, peers: Peers, order: DataOrder, *, may_wait: bool
) -> list[Instrument]:
    """The instruments that a cell asks for, in the order in which they act after a step, without checkpoints.

    may_wait: whether ranks may wait for each other before the last step. Raises InputError if an instrument is impossible.
    """
    for key, why in observed_steps.list_refusals(cell, order.count_timed_steps(cell), cuda=ranks.device.type == "cuda"):
        raise InputError(f"{key}: {why}")
    instruments: list[Instrument] = []
    instruments += _create_memory_instruments(cell, engine, run_dir, ranks, peers)
    instruments += _create_profile_instruments(cell, run_dir, ranks, peers)
    if cell.instruments.validation is not None:
        path = run_dir.validation_file
        instruments.append(
            Validator(cell.instruments.validation, cell, task, engine, ranks, peers, order, path, may_wait=may_wait)
        )
    return instruments


def _create_memory_instruments(cell: Cell, engine: Engine, run_dir: RunDir, ranks: Ranks, peers: Peers) -> list[Instrument]:
    memory_steps = observed_steps.choose_memory_steps(cell)
    if cell.instruments.memory == "categories":
        path = run_dir.memory_file(ranks.rank)
        return [MemoryCategories(cell, menu.find_strategy_of_cell(cell), engine, path, memory_steps, ranks, peers)]
    if cell.instruments.memory == "snapshot":
        return [MemorySnapshot(run_dir.snapshot_file(ranks.rank), memory_steps[0], ranks, peers)]
    return []


def _create_profile_instruments(cell: Cell, run_dir: RunDir, ranks: Ranks, peers: Peers) -> list[Instrument]:
    if cell.instruments.profile is None:
        return []
    return [Profiler(cell.instruments.profile, run_dir.trace_file(ranks.rank), ranks, peers)]
