"""Parameter servers: ranks that hold the parameters and update them with the gradients that workers push.

The study (paper 3, sections 3.4 and 5.3.1) has three of them: synchronous ("all nodes must await completion of the slowest
worker"), asynchronous ("workers independently compute and apply parameter updates"), and a modified asynchronous one
against staleness: bounded staleness, gradients weighted by their age, and a chosen frequency of communication.

Workers are the first ranks, servers the last ranks. Workers therefore have the same numbers as the ranks of every other
strategy: rank 0 trains, and local rank r has GPU r. Servers compute on the CPU and have no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from shardlab.cell import Cell
from shardlab.registry import Option
from trainers import switches
from trainers.parameter_server.ledger import Mode
from trainers.precision import ALL, weight_dtype
from trainers.strategy import Strategy

if TYPE_CHECKING:
    from trainers.parameter_server.server import ParameterServer
    from trainers.parameter_server.worker import WorkerEngine
    from trainers.ranks import Ranks
    from trainers.workload import Task


def synchronous(_: Cell) -> Mode:
    """Section 3.4: one update for a step of all workers, with the mean of their gradients; the work of one process."""
    return Mode(waits=True)


def asynchronous(_: Cell) -> Mode:
    """Section 3.4: every push is an update at once. The learning rate stays what it is (section 5.2: one recipe for all)."""
    return Mode()


def bounded(cell: Cell) -> Mode:
    """Section 5.3.1, which gives no numbers: the bound is that of Ho et al. (2013), the weight 1 / (1 + staleness)."""
    return Mode(
        staleness_bound=cast("int", cell.options["staleness_bound"]),
        staleness_weighted=cast("bool", cell.options["staleness_weighted"]),
        pull_interval=cast("int", cell.options["pull_interval"]),
    )


def refuse(cell: Cell) -> str | None:
    if cell.optimizer.name != "sgd":
        return f"parameter servers update with SGD (and momentum) only: found optimizer {cell.optimizer.name}. Allowed: sgd."
    if cell.nnodes > 1:
        return f"parameter servers are the last ranks, all on the last node: found nnodes: {cell.nnodes}. Allowed: nnodes: 1."
    return None


def worker(mode: Callable[[Cell], Mode]) -> Callable[[Cell, Task, Ranks], WorkerEngine]:
    """The function that builds the engine of a rank that trains."""

    def build(cell: Cell, task: Task, ranks: Ranks) -> WorkerEngine:
        from trainers.parameter_server.worker import WorkerEngine

        model = switches.checkpoint_and_compile(cell, task, task.model().to(ranks.device, weight_dtype(cell.precision)))
        return WorkerEngine(cell, task, ranks, model, mode(cell))

    return build


def server(mode: Callable[[Cell], Mode]) -> Callable[[Cell, Task, Ranks], ParameterServer]:
    """The function that builds the server of one of the last ranks."""

    def build(cell: Cell, task: Task, ranks: Ranks) -> ParameterServer:
        from trainers.parameter_server.server import ParameterServer

        return ParameterServer(cell, task, ranks, mode(cell))

    return build


SWITCHES = ("activation_checkpointing", "compile")  # to clip, servers would have to know the norm of the whole gradient
NO_COMMON_STEP = "workers are at different steps, so the parameters never belong to one step of all workers"
OWN_ORDER = "each worker's gradient is applied on its own, in the order of arrival, so no two runs do the same work"

VARIANTS = (
    Strategy(
        name="ps-sync",
        summary="parameter servers that wait for all workers and apply the mean gradient",
        precisions=ALL,
        refuse=refuse,
        build=worker(synchronous),
        server=server(synchronous),
        servers=True,
        switches=SWITCHES,
    ),
    Strategy(
        name="ps-async",
        summary="parameter servers that apply each worker's gradient at once",
        precisions=ALL,
        refuse=refuse,
        build=worker(asynchronous),
        server=server(asynchronous),
        servers=True,
        switches=SWITCHES,
        unprovable=lambda _: OWN_ORDER,
        no_checkpoints=NO_COMMON_STEP,
        tolerates_lost_ranks=True,
    ),
    Strategy(
        name="ps-ssp",
        summary="asynchronous parameter servers with bounded staleness; stale gradients get a smaller weight",
        precisions=ALL,
        refuse=refuse,
        build=worker(bounded),
        server=server(bounded),
        servers=True,
        switches=SWITCHES,
        options=(
            Option("staleness_bound", 4, "maximum number of steps that a worker may be ahead of the slowest worker", least=0),
            Option("staleness_weighted", True, "weight a gradient by 1 / (1 + updates since its worker pulled parameters)"),
            Option("pull_interval", 1, "a worker pulls parameters once in this many pushes", least=1),
        ),
        unprovable=lambda _: OWN_ORDER,
        no_checkpoints=NO_COMMON_STEP,
        tolerates_lost_ranks=True,
    ),
)
