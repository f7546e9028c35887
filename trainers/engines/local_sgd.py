"""The engine of local SGD."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.communication import bytes_of
from trainers.dtypes import weight_dtype
from trainers.replicated import ReplicatedEngine
from trainers.theory.term import ModelPart, Term
from trainers.theory.whole_models import get_averaging_period, list_averaging_terms

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class LocalSgdEngine(ReplicatedEngine):
    steps_alone = 0  # the number of steps since the last average

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def update(self) -> None:
        super().update()
        self.steps_alone += 1
        if self.steps_alone == get_averaging_period(self.cell):
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Average the parameters, unless they are averaged already."""
        if not self.steps_alone:
            return
        parameters = list(self.model.parameters())
        means = self._average(parameters).split_with_sizes([parameter.numel() for parameter in parameters])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.copy_(mean.view_as(parameter))
        self.steps_alone = 0

    def _average(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The means of tensors over all ranks, as one flat tensor. A collective.

        torch's `average_parameters` is not used, because it makes parameters views of its flat tensor, without their memory
        format.
        """
        flat_tensor = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat_tensor)
        return flat_tensor.div_(self.data_ranks)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm of the mean gradient of all ranks."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return float(torch.linalg.vector_norm(self._average(gradients), dtype=torch.float32))

    def theory(self) -> list[Term]:
        return list_averaging_terms(self.cell, ModelPart(elements=sum(p.numel() for p in self.model.parameters())))

    def compute_textbook_bytes(self) -> float:
        return 2.0 * bytes_of(self.model.parameters()) / get_averaging_period(self.cell)

    def make_state_parts(self) -> State:
        """As `Checkpointable.make_state_parts`; between averages, ranks have own parameters, and always own states."""
        parts = super().make_state_parts()
        for part in parts.values():
            part.differs_by_rank = True
        return parts

    def collect_numbers(self) -> dict[str, float]:
        return {**super().collect_numbers(), "steps_alone": float(self.steps_alone)}

    def finish_loading(self, numbers: dict[str, float]) -> None:
        super().finish_loading(numbers)
        self.steps_alone = int(numbers["steps_alone"])

    def effective(self) -> dict[str, Any]:
        return {**super().effective(), "averaging_period": get_averaging_period(self.cell)}


def build(cell: Cell, task: Task, ranks: Ranks) -> LocalSgdEngine:
    model = task.model().to(ranks.device, weight_dtype(cell.precision))
    return LocalSgdEngine(cell, task, ranks, model_options.checkpoint_and_compile(cell, task, model))
