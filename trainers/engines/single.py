"""The engine of one process, which has the whole model and the whole batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.dtypes import weight_dtype
from trainers.replicated import ReplicatedEngine
from trainers.theory.term import Term

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class SingleEngine(ReplicatedEngine):
    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def theory(self) -> list[Term]:
        return []

    def compute_textbook_bytes(self) -> float:
        return 0.0


def build(cell: Cell, task: Task, ranks: Ranks) -> SingleEngine:
    model = model_options.checkpoint_and_compile(cell, task, task.model().to(ranks.device, weight_dtype(cell.precision)))
    return SingleEngine(cell, task, ranks, model)
