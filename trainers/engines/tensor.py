"""The engine of tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlab.matrix.cell import Cell
from trainers.instruments.timing import BACKWARD
from trainers.parallel.engine import MeshModelEngine
from trainers.parallel.mesh_model import MeshModel
from trainers.plans.plan import add_sequence_hooks
from trainers.strategy_options import TensorOptions

if TYPE_CHECKING:
    from trainers.instruments.timing import Clock
    from trainers.parallel.mesh_model import MeshModel
    from trainers.ranks.ranks import Ranks
    from trainers.task import Batch, Task


class TensorEngine(MeshModelEngine):
    def __init__(self, cell: Cell, ranks: Ranks, mesh_model: MeshModel) -> None:
        super().__init__(cell, ranks, mesh_model)
        if mesh_model.sequence:
            # The hooks are on the outermost wrappers. Recomputation runs only the modules inside, so it does not repeat
            # the hooks. The hooks of fully_shard run before these hooks, so fully_shard never gets their results.
            add_sequence_hooks(mesh_model.blocks[0], mesh_model.blocks[-1], mesh_model.mesh["tp"])

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        loss = super().forward_backward(micro_batches, clock)
        self.mesh_model.sum_partial_gradients()
        clock.mark(BACKWARD)
        return loss

    def effective(self) -> dict[str, Any]:
        sequence_parallel = self.mesh_model.count_partial_elements() > 0
        return {
            **super().effective(),
            "split_layers": count_split_layers(self.mesh_model),
            "sequence_parallel": sequence_parallel,
        }


def count_split_layers(mesh_model: MeshModel) -> int:
    """The number of linear layers whose weight is split over the tensor-parallel ranks."""
    linear_weights = [module.weight for module in mesh_model.module.modules() if isinstance(module, nn.Linear)]
    return sum(isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()) for weight in linear_weights)


def build(cell: Cell, task: Task, ranks: Ranks) -> TensorEngine:
    mesh_model = MeshModel(cell, task, ranks, split=True, sequence=TensorOptions(cell.options).sequence_parallel)
    return TensorEngine(cell, ranks, mesh_model)
