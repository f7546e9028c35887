"""One process with the whole model and the whole batch: what every other strategy is compared with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from shardlab.cell import Cell
from trainers import switches
from trainers.communication import Term
from trainers.precision import ALL, weight_dtype
from trainers.replicated import ReplicatedEngine
from trainers.strategy import Strategy

if TYPE_CHECKING:
    from trainers.ranks import Ranks
    from trainers.workload import Task


class SingleEngine(ReplicatedEngine):
    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def theory(self) -> list[Term]:
        return []

    def textbook_bytes(self) -> float:
        return 0.0


def refuse(cell: Cell) -> str | None:
    return None if cell.gpus == 1 else f"single is one process: found gpus: {cell.gpus}. Allowed: gpus: 1."


def build(cell: Cell, task: Task, ranks: Ranks) -> SingleEngine:
    model = switches.checkpoint_and_compile(cell, task, task.model().to(ranks.device, weight_dtype(cell.precision)))
    return SingleEngine(cell, task, ranks, model)


VARIANTS = (
    Strategy(
        name="single",
        summary="one process with the whole model and the whole batch: the reference",
        precisions=ALL,
        refuse=refuse,
        build=build,
        switches=switches.ALL,
        cuts=(),
    ),
)
