"""The engine of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.communication import Term
from trainers.instruments.timing import BACKWARD
from trainers.model.precision import computed_bytes, stream_bytes, weight_bytes
from trainers.parallel.engine import MeshModelEngine
from trainers.parallel.mesh_model import MeshModel
from trainers.plans.plan import cut_between

if TYPE_CHECKING:
    from trainers.instruments.timing import Clock
    from trainers.parallel.mesh_model import MeshModel
    from trainers.ranks.ranks import Ranks
    from trainers.task import Batch, Task


class TensorEngine(MeshModelEngine):
    def __init__(self, cell: Cell, task: Task, ranks: Ranks, held: MeshModel) -> None:
        super().__init__(cell, task, ranks, held)
        if held.sequence:
            # The hooks are on the outermost wrappers. Recomputation runs only the modules inside, so it does not repeat
            # the hooks. The hooks of fully_shard run before these hooks, so fully_shard never gets their results.
            cut_between(held.blocks[0], held.blocks[-1], held.mesh["tp"])

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        loss = super().forward_backward(micro_batches, clock)
        self.held.sum_partial_gradients()
        clock.mark(BACKWARD)
        return loss

    def theory(self) -> list[Term]:
        return [*activations(self.cell, self.task, self.held), *self.agreeing()]

    def effective(self) -> dict[str, Any]:
        return {**super().effective(), "split_layers": split_layers(self.held), "sequence_parallel": self.held.partial() > 0}


def activations(cell: Cell, task: Task, held: MeshModel) -> list[Term]:
    """The communication of a rank's split blocks in a step, over the tensor-parallel ranks."""
    plan = task.plan()
    elements, n = cell.micro_batch_size * math.prod(plan.hidden), held.mesh["tp"].size()
    # With autocast, a linear layer computes in 16 bits but casts its input itself: the input and its gradient are fp32.
    written, read = elements * computed_bytes(cell.precision), elements * stream_bytes(cell.precision)
    blocks = len(held.blocks) * cell.gradient_accumulation_steps
    again = model_options.effective(held.module)["checkpointed_blocks"] * cell.gradient_accumulation_steps
    if held.sequence:
        return _activations_in_slices(cell, held, written, read, blocks, again)
    return [
        Term("what row-parallel layers write, such as those of attention and of the MLP, each block and pass", "all_reduce",
             written, n, plan.forward_reductions * blocks),
        Term("gradients of what column-parallel layers read, each block and pass", "all_reduce",
             read, n, plan.backward_reductions * blocks),
        # Recomputation stops when it has all tensors that backward needs. The last all-reduce of a block would come
        # later, so recomputation does not repeat it.
        Term("what they write once more but for the last of a block, each recomputed block and pass", "all_reduce",
             written, n, (plan.forward_reductions - 1) * again),
    ]  # fmt: skip


def _activations_in_slices(cell: Cell, held: MeshModel, written: int, read: int, blocks: int, again: int) -> list[Term]:
    """As `activations`, with sequence parallelism, for a model with a fused q|k|v layer."""
    n, passes = held.mesh["tp"].size(), cell.gradient_accumulation_steps
    return [
        Term("what column-parallel layers read, each block and pass", "all_gather", read, n, 2 * (blocks + again)),
        Term("its gradient, each block and pass", "reduce_scatter", read, n, 2 * blocks),
        Term("what row-parallel layers write, each block and pass", "reduce_scatter", written, n, 2 * blocks + again),
        Term("its gradient, each block and pass", "all_gather", written, n, 2 * blocks),
        Term("what leaves the blocks, and the gradient of what enters them, each pass", "all_gather", read, n, 2 * passes),
        Term("gradients of the layer norms, once a step", "all_reduce", weight_bytes(cell.precision) * held.partial(), n),
    ]


def split_layers(held: MeshModel) -> int:
    """The number of linear layers whose weight is split over the tensor-parallel ranks."""
    linears = [module.weight for module in held.module.modules() if isinstance(module, nn.Linear)]
    return sum(isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()) for weight in linears)


def build(cell: Cell, task: Task, ranks: Ranks) -> TensorEngine:
    held = MeshModel(cell, task, ranks, split=True, sequence=bool(cell.options["sequence_parallel"]))
    return TensorEngine(cell, task, ranks, held)
