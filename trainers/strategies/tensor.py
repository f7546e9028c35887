"""Tensor parallelism: each block's linear layers are split over the ranks, and all ranks work on the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from shardlab.cell import Cell
from shardlab.registry import Option
from trainers import menu, switches
from trainers.communication import Term
from trainers.instruments.timing import BACKWARD
from trainers.parallel.engine import HeldEngine
from trainers.precision import ALL, computed_bytes, stream_bytes, weight_bytes
from trainers.strategy import Strategy

if TYPE_CHECKING:
    import torch

    from trainers.instruments.timing import Clock
    from trainers.parallel.held import Held
    from trainers.ranks import Ranks
    from trainers.workload import Batch, Task


class TensorEngine(HeldEngine):
    def __init__(self, cell: Cell, task: Task, ranks: Ranks, held: Held) -> None:
        super().__init__(cell, task, ranks, held)
        if held.sequence:
            from trainers.plans.sequence import cut_between

            # Outermost, where neither recomputation repeats it nor fully_shard watches over what it gives.
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


def activations(cell: Cell, task: Task, held: Held) -> list[Term]:
    """What the split blocks of a rank exchange in a step."""
    from trainers.plans.plan import FORWARD_REDUCTIONS

    plan = task.plan()
    positions, width = plan.hidden
    elements, n = cell.micro_batch_size * positions * width, held.mesh["tp"].size()
    # Autocast computes a linear layer in 16 bits but casts inside it: what it reads, and the gradient of that, is fp32.
    written, read = elements * computed_bytes(cell.precision), elements * stream_bytes(cell.precision)
    blocks = len(held.blocks) * cell.gradient_accumulation_steps
    again = switches.effective(held.module)["checkpointed_blocks"] * cell.gradient_accumulation_steps
    if held.sequence:
        return _activations_in_slices(cell, held, written, read, blocks, again)
    return [
        Term("activations behind attention and behind the MLP, each block and pass", "all_reduce",
             written, n, FORWARD_REDUCTIONS * blocks),
        Term("gradients of what column-parallel layers read, each block and pass", "all_reduce",
             read, n, plan.backward_reductions * blocks),
        # Recomputation stops when backward has all that it saved, and the block's last sum is not among it.
        Term("activations behind attention once more, each recomputed block and pass", "all_reduce", written, n, again),
    ]  # fmt: skip


def _activations_in_slices(cell: Cell, held: Held, written: int, read: int, blocks: int, again: int) -> list[Term]:
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


def split_layers(held: Held) -> int:
    """The number of linear layers whose weight is split over the tensor-parallel ranks."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    linears = [module.weight for module in held.module.modules() if isinstance(module, nn.Linear)]
    return sum(isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()) for weight in linears)


def why_not_split(cell: Cell) -> str | None:
    """Why a workload's blocks cannot be split over so many ranks, or None."""
    workload = menu.workload(cell.workload)
    if workload.heads is None:
        able = ", ".join(name for name, other in menu.workloads().items() if other.heads is not None)
        return f"{cell.strategy} cannot split {cell.workload}: it defines no split of its layers. Allowed workloads: {able}."
    heads = cell.options[workload.heads]
    assert isinstance(heads, int)
    if heads % cell.tp:
        allowed = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        return f"{cell.workload} has {heads} attention heads ({workload.heads}), found tp: {cell.tp}. Allowed tp: {allowed}."
    return None


def why_not_in_slices(cell: Cell) -> str | None:
    """Why the positions of a sequence cannot be split over so many ranks, or None. Always None if the option is off."""
    if not cell.options["sequence_parallel"]:
        return None
    if cell.seq_len is None:
        return f"sequence_parallel splits sequences, but {cell.workload} has no sequences. Allowed: leave it out."
    if cell.seq_len % cell.tp:
        return (
            f"sequence_parallel: tp: {cell.tp} does not divide the {cell.seq_len} positions of a sequence (seq_len). "
            "Allowed: a seq_len that is a multiple of tp, or false."
        )
    return None


def refuse(cell: Cell) -> str | None:
    return why_not_split(cell) or why_not_in_slices(cell)


def build(cell: Cell, task: Task, ranks: Ranks) -> TensorEngine:
    from trainers.parallel.held import Held

    held = Held(cell, task, ranks, split=True, sequence=bool(cell.options["sequence_parallel"]))
    return TensorEngine(cell, task, ranks, held)


SEQUENCE_PARALLEL = Option("sequence_parallel", False, "between split layers, each rank keeps only a slice of the positions")
VARIANTS = (
    Strategy(
        name="tp",
        summary="each block's linear layers split over the ranks, by columns, then by rows (PyTorch parallelize_module)",
        precisions=ALL,
        refuse=refuse,
        build=build,
        degrees=("tp",),
        switches=("activation_checkpointing", "max_grad_norm"),
        options=(SEQUENCE_PARALLEL,),
    ),
)
