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
from trainers.plans.plan import add_sequence_hooks

if TYPE_CHECKING:
    from trainers.instruments.timing import Clock
    from trainers.parallel.mesh_model import MeshModel
    from trainers.ranks.ranks import Ranks
    from trainers.task import Batch, Task


class TensorEngine(MeshModelEngine):
    def __init__(self, cell: Cell, task: Task, ranks: Ranks, mesh_model: MeshModel) -> None:
        super().__init__(cell, task, ranks, mesh_model)
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

    def theory(self) -> list[Term]:
        return [*activation_terms(self.cell, self.task, self.mesh_model), *self.agreement_terms()]

    def effective(self) -> dict[str, Any]:
        sequence_parallel = self.mesh_model.count_partial_elements() > 0
        return {
            **super().effective(),
            "split_layers": count_split_layers(self.mesh_model),
            "sequence_parallel": sequence_parallel,
        }


def activation_terms(cell: Cell, task: Task, mesh_model: MeshModel) -> list[Term]:
    """The communication of a rank's split blocks in a step, over the tensor-parallel ranks."""
    plan = task.plan()
    hidden_elements, n = cell.micro_batch_size * math.prod(plan.hidden), mesh_model.mesh["tp"].size()
    # With autocast, a linear layer computes in 16 bits but casts its input itself: the input and its gradient are fp32.
    output_bytes, input_bytes = hidden_elements * computed_bytes(cell.precision), hidden_elements * stream_bytes(cell.precision)
    block_passes = len(mesh_model.blocks) * cell.gradient_accumulation_steps
    recomputed_passes = model_options.effective(mesh_model.module)["checkpointed_blocks"] * cell.gradient_accumulation_steps
    if mesh_model.sequence:
        return _sequence_parallel_terms(cell, mesh_model, output_bytes, input_bytes, block_passes, recomputed_passes)
    return [
        Term("what row-parallel layers write, such as those of attention and of the MLP, each block and pass", "all_reduce",
             output_bytes, n, plan.forward_reductions * block_passes),
        Term("gradients of what column-parallel layers read, each block and pass", "all_reduce",
             input_bytes, n, plan.backward_reductions * block_passes),
        # Recomputation stops when it has all tensors that backward needs. The last all-reduce of a block would come
        # later, so recomputation does not repeat it.
        Term("what they write once more but for the last of a block, each recomputed block and pass", "all_reduce",
             output_bytes, n, (plan.forward_reductions - 1) * recomputed_passes),
    ]  # fmt: skip


def _sequence_parallel_terms(
    cell: Cell, mesh_model: MeshModel, output_bytes: int, input_bytes: int, blocks: int, recomputed: int
) -> list[Term]:
    """As `activation_terms`, with sequence parallelism, for a model with a fused q|k|v layer."""
    n, passes = mesh_model.mesh["tp"].size(), cell.gradient_accumulation_steps
    norm_bytes = weight_bytes(cell.precision) * mesh_model.count_partial_elements()
    return [
        Term(
            "what column-parallel layers read, each block and pass",
            "all_gather",
            input_bytes,
            n,
            2 * (blocks + recomputed),
        ),
        Term("its gradient, each block and pass", "reduce_scatter", input_bytes, n, 2 * blocks),
        Term(
            "what row-parallel layers write, each block and pass",
            "reduce_scatter",
            output_bytes,
            n,
            2 * blocks + recomputed,
        ),
        Term("its gradient, each block and pass", "all_gather", output_bytes, n, 2 * blocks),
        Term(
            "what leaves the blocks, and the gradient of what enters them, each pass", "all_gather", input_bytes, n, 2 * passes
        ),
        Term(
            "gradients of the layer norms, once a step",
            "all_reduce",
            norm_bytes,
            n,
        ),
    ]


def count_split_layers(mesh_model: MeshModel) -> int:
    """The number of linear layers whose weight is split over the tensor-parallel ranks."""
    linear_weights = [module.weight for module in mesh_model.module.modules() if isinstance(module, nn.Linear)]
    return sum(isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()) for weight in linear_weights)


def build(cell: Cell, task: Task, ranks: Ranks) -> TensorEngine:
    mesh_model = MeshModel(cell, task, ranks, split=True, sequence=bool(cell.options["sequence_parallel"]))
    return TensorEngine(cell, task, ranks, mesh_model)
