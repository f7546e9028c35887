"""The engine of a worker, and the server of the last ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shardlab.cell import Cell
from trainers import model_options
from trainers.dtypes import weight_dtype
from trainers.parameter_server.ledger import Mode
from trainers.parameter_server.server import ParameterServer
from trainers.parameter_server.worker import WorkerEngine

if TYPE_CHECKING:
    from trainers.ranks import Ranks
    from trainers.task import Task


def build(cell: Cell, task: Task, ranks: Ranks, *, waits: bool = False) -> WorkerEngine:
    """The engine of a rank that trains."""
    model = model_options.checkpoint_and_compile(cell, task, task.model().to(ranks.device, weight_dtype(cell.precision)))
    return WorkerEngine(cell, task, ranks, model, mode(cell, waits=waits))


def build_server(cell: Cell, task: Task, ranks: Ranks, *, waits: bool = False) -> ParameterServer:
    """The server of one of the last ranks."""
    return ParameterServer(cell, task, ranks, mode(cell, waits=waits))


def mode(cell: Cell, *, waits: bool) -> Mode:
    """How servers treat pushes.

    waits (section 3.4, synchronous): one update for a step of all workers, with the mean of their gradients; the work of one
    process. Else every push is an update at once, and the learning rate stays what it is (section 5.2: one recipe for all).
    With options, pushes are bounded (section 5.3.1, which gives no numbers): the bound is that of Ho et al. (2013), the weight
    1 / (1 + staleness).
    """
    if "staleness_bound" not in cell.options:
        return Mode(waits=waits)
    return Mode(
        staleness_bound=cast("int", cell.options["staleness_bound"]),
        staleness_weighted=cast("bool", cell.options["staleness_weighted"]),
        pull_interval=cast("int", cell.options["pull_interval"]),
    )
