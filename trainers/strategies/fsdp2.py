"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state cut over the ranks, gathered block by block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Cell
from trainers import switches
from trainers.communication import Term
from trainers.precision import MIXED, dtype_name
from trainers.replicated import ReplicatedEngine
from trainers.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from trainers.ranks import Ranks
    from trainers.workload import Task


class Fsdp2Engine(ReplicatedEngine):
    def __init__(self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module, *, reshards: bool) -> None:
        super().__init__(cell, task, ranks, model)
        self._reshards = reshards  # after forward, so that backward gathers again

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        # Until the last pass gradients stay whole on every rank: no communication, at the price of their memory.
        cast("FSDPModule", self.model).set_requires_gradient_sync(last)
        return nullcontext()

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()  # fully_shard itself casts what it gathers

    def theory(self) -> list[Term]:
        blocks, rest = self._padded_elements()
        passes, n = self.cell.gradient_accumulation_steps, self.data_ranks
        again = 2 if self._reshards else 1
        gathered, reduced = self._itemsizes()
        return [
            Term("blocks' parameters, gathered for forward and (unless kept) backward of each pass", "all_gather",
                 blocks * gathered, n, again * passes),
            Term("other parameters, gathered once a pass", "all_gather", rest * gathered, n, passes),
            Term("gradients, once a step", "reduce_scatter", (blocks + rest) * reduced, n),
        ]  # fmt: skip

    def textbook_bytes(self) -> float:
        psi = 4.0 * self.parameters()
        return (3 if self._reshards else 2) * psi

    def _padded_elements(self) -> tuple[int, int]:
        """Elements of the blocks and of the rest; each parameter's first dimension is padded to a multiple of the ranks."""
        blocks = {id(p) for block in self.task.blocks(self.model) for p in block.parameters()}
        n = self.data_ranks
        sizes = {True: 0, False: 0}
        for parameter in self.model.parameters():
            first = parameter.shape[0] if parameter.dim() else 1
            sizes[id(parameter) in blocks] += parameter.numel() // first * (-(-first // n) * n)
        return sizes[True], sizes[False]

    def _itemsizes(self) -> tuple[int, int]:
        """Bytes of an element as parameters are gathered and as gradients are reduced."""
        return (2, 4) if self.cell.precision == "bf16" else (4, 4)

    def effective(self) -> dict[str, Any]:
        from torch.distributed.fsdp import FSDPModule

        blocks = list(map(id, self.task.blocks(self.model)))
        wrapped = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        # The public interface tells none of this; torch is pinned, and a test reads these fields.
        groups = {id(m): group for m in wrapped for group in m._get_fsdp_state()._fsdp_param_groups}
        policies = {group.mp_policy for group in groups.values()}
        assert len(policies) == 1, f"one policy was given to all groups, found {policies}"
        policy = policies.pop()
        return {
            **super().effective(),
            "reshard_after_forward": all(groups[key].post_forward_mesh_info is not None for key in blocks),
            "sharded_groups": len(groups),
            "shard_parameters": sum(p.to_local().numel() for p in self.model.parameters()),  # type: ignore[attr-defined]
            "parameters_gathered_as": dtype_name(policy.param_dtype) if policy.param_dtype else "float32",
            "gradients_reduced_as": dtype_name(policy.reduce_dtype) if policy.reduce_dtype else "float32",
        }


def builder(*, reshard_after_forward: bool) -> Callable[[Cell, Task, Ranks], Fsdp2Engine]:
    """What builds the engine: blocks are freed after forward and gathered again for backward, or kept for backward."""

    def build(cell: Cell, task: Task, ranks: Ranks) -> Fsdp2Engine:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if cell.precision == "bf16" else MixedPrecisionPolicy()
        model = switches.checkpoint_and_compile(cell, task, task.model().to(ranks.device))
        for block in task.blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        # What no block holds (embeddings, head) is needed at once by backward: it is never freed after forward.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        return Fsdp2Engine(cell, task, ranks, model, reshards=reshard_after_forward)

    return build


def refuse(_: Cell) -> str | None:
    return None


VARIANTS = (
    Strategy(
        name="fsdp2",
        summary="parameters, gradients and optimizer state sharded (PyTorch fully_shard; as ZeRO stage 3)",
        precisions=MIXED,
        refuse=refuse,
        switches=switches.ALL,
        build=builder(reshard_after_forward=True),
    ),
    Strategy(
        name="fsdp2-zero2",
        summary="sharded alike, but parameters stay gathered from forward to backward (as ZeRO stage 2)",
        precisions=MIXED,
        refuse=refuse,
        switches=switches.ALL,
        build=builder(reshard_after_forward=False),
    ),
)
