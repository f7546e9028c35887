"""Builds the engine of a worker, and the parameter server of each of the last ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.dtypes import weight_dtype
from trainers.parameter_server.ledger import ServerMode
from trainers.parameter_server.server import ParameterServer
from trainers.parameter_server.worker import WorkerEngine
from trainers.strategy_options import AsynchronousOptions, StalenessOptions

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


def build(cell: Cell, task: Task, ranks: Ranks, *, waits: bool = False) -> WorkerEngine:
    """The engine of a rank that trains (a worker). waits: as in `make_mode`."""
    model = model_options.checkpoint_and_compile(cell, task, task.model().to(ranks.device, weight_dtype(cell.precision)))
    return WorkerEngine(cell, task, ranks, model, make_mode(cell, waits=waits))


def build_server(cell: Cell, task: Task, ranks: Ranks, *, waits: bool = False) -> ParameterServer:
    """The parameter server of one of the last ranks. waits: as in `make_mode`."""
    return ParameterServer(cell, task, ranks, make_mode(cell, waits=waits))


def make_mode(cell: Cell, *, waits: bool) -> ServerMode:
    """How servers treat pushes, which are gradients that workers send. The sections named below are sections of the study (see
    trainers/strategies/parameter_server.py).

    waits: true: servers make one update for each step of all workers, with the mean of their gradients, as one process would do
    (section 3.4, synchronous). False: each push is an update at once, with the same learning rate (section 5.2: one recipe for
    all). If the cell has the options of bounded staleness (section 5.3.1, which gives no numbers), the bound is the bound of Ho
    et al. (2013), and the weight of a gradient is 1 / (1 + staleness).
    """
    staleness = StalenessOptions(cell.options) if "staleness_bound" in cell.options else None
    return ServerMode(
        waits=waits,
        staleness_bound=None if staleness is None else staleness.staleness_bound,
        staleness_weighted=staleness is not None and staleness.staleness_weighted,
        pull_interval=AsynchronousOptions(cell.options).pull_interval,
    )
