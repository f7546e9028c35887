"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state sharded over the ranks, gathered block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Cell
from shardlab.registry import Option
from trainers import loss_scaling, switches
from trainers.communication import Term
from trainers.parallel import sharded_groups
from trainers.parallel.hybrid_mesh import REPLICAS, refuse_replicas, replicas_mesh
from trainers.precision import REASONS, SHARDED, cast_dtype, computed_bytes, weight_bytes, weight_dtype
from trainers.replicated import ReplicatedEngine
from trainers.strategy import Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from trainers.ranks import Ranks
    from trainers.workload import Task


class Fsdp2Engine(ReplicatedEngine):
    casts_itself = True

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module, *, reshards: bool) -> None:
        super().__init__(cell, task, ranks, model)
        self._reshards = reshards  # after forward, so that backward gathers again
        self._replicas = cast("int", cell.options.get("replicas", 1))
        self._offloaded = cell.options["offload"] == "cpu"

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        # Until the last pass gradients stay whole on every rank: no communication, at the price of their memory.
        cast("FSDPModule", self.model).set_requires_gradient_sync(last)
        return nullcontext()

    def theory(self) -> list[Term]:
        blocks, rest = self._padded_elements()
        passes, n = self.cell.gradient_accumulation_steps, self.data_ranks // self._replicas
        again = 2 if self._reshards else 1
        gathered, reduced = computed_bytes(self.cell.precision), weight_bytes(self.cell.precision)
        terms = [
            Term("blocks' parameters, gathered for forward and (unless kept) backward of each pass", "all_gather",
                 blocks * gathered, n, again * passes),
            Term("other parameters, gathered once a pass", "all_gather", rest * gathered, n, passes),
            Term("gradients, once a step", "reduce_scatter", (blocks + rest) * reduced, n),
        ]  # fmt: skip
        if self._replicas > 1:
            shard = (blocks + rest) * reduced / n
            terms.append(Term("gradients' shards among replicas, once a step", "all_reduce", shard, self._replicas))
        return [*terms, *loss_scaling.sign(self.cell.precision, n)]

    def everywhere(self, overflowed: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        mesh = cast("DTensor", next(self.model.parameters())).device_mesh
        dist.all_reduce(overflowed, group=mesh.get_group(mesh.ndim - 1))  # replicas hold the same shards
        return overflowed

    def gradient_norm(self) -> float:
        import torch
        import torch.distributed as dist

        if not self._offloaded:
            return super().gradient_norm()
        gradients = [cast("DTensor", p.grad) for p in self.model.parameters() if p.grad is not None]
        square = torch.stack([g.to_local().float().square().sum() for g in gradients]).sum().to(self.device)
        mesh = gradients[0].device_mesh
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))  # NCCL sums nothing that lies on the CPU
        return float(square.sqrt())

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        from torch.distributed.tensor import DTensor

        if not self._offloaded:
            return super().whole_parameters()
        found = {}
        for name, parameter in cast("Iterable[tuple[str, DTensor]]", self.model.named_parameters()):
            local, mesh = parameter.to_local().to(self.device), parameter.device_mesh
            shape, stride = parameter.shape, parameter.stride()
            there = DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
            found[switches.plain_name(name)] = there.full_tensor().detach().float().cpu().clone()
        return found

    def textbook_bytes(self) -> float:
        psi = float(weight_bytes(self.cell.precision)) * self.parameters()
        return (3 if self._reshards else 2) * psi

    def _padded_elements(self) -> tuple[int, int]:
        """Elements of the blocks and of the rest; each parameter's first dimension is padded to a multiple of the ranks."""
        blocks = {id(p) for block in self.task.blocks(self.model) for p in block.parameters()}
        n = self.data_ranks // self._replicas
        sizes = {True: 0, False: 0}
        for parameter in self.model.parameters():
            first = parameter.shape[0] if parameter.dim() else 1
            sizes[id(parameter) in blocks] += parameter.numel() // first * (-(-first // n) * n)
        return sizes[True], sizes[False]

    def effective(self) -> dict[str, Any]:
        from torch.distributed.fsdp import FSDPModule

        from trainers import activation_checkpointing

        wrapped = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        return {
            **super().effective(),
            **sharded_groups.effective(self.model, activation_checkpointing.units(self.task, self.model)),
            "mesh": list(next(self.model.parameters()).device_mesh.shape),  # type: ignore[attr-defined]
            "prefetch": max(len(m._get_fsdp_state()._states_to_forward_prefetch) for m in wrapped),
            "parameters_on": str(next(self.model.parameters()).device),
            "shard_parameters": sum(p.to_local().numel() for p in self.model.parameters()),  # type: ignore[attr-defined]
        }


def builder(*, reshard_after_forward: bool, replicated: bool = False) -> Callable[[Cell, Task, Ranks], Fsdp2Engine]:
    """The function that builds the engine.

    reshard_after_forward: free the gathered parameters of a block after forward and gather them again for backward; else they
    are kept for backward. replicated: shard over the ranks of each replica (a 2-D mesh), not over all ranks.
    """

    def build(cell: Cell, task: Task, ranks: Ranks) -> Fsdp2Engine:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        from trainers import activation_checkpointing
        from trainers.deferred_init import Deferred

        mesh = replicas_mesh(cell, ranks) if replicated else init_device_mesh(ranks.device.type, (ranks.world_size,))
        low = cast_dtype(cell.precision)
        mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        pinned = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        given: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": mixed if low else MixedPrecisionPolicy(),
            "offload_policy": pinned if cell.options["offload"] == "cpu" else OffloadPolicy(),
        }
        deferred = Deferred(task, ranks, weight_dtype(cell.precision))
        model = switches.checkpoint_and_compile(cell, task, deferred.model)
        blocks = activation_checkpointing.units(task, model)
        for block in blocks:
            deferred.fill(block)
            fully_shard(block, reshard_after_forward=reshard_after_forward, **given)
        # What no block holds (embeddings, head) is needed at once by backward: it is never freed after forward.
        deferred.fill(model)
        fully_shard(model, reshard_after_forward=False, **given)
        _prefetch(cast("list[FSDPModule]", blocks), cast("int", cell.options["prefetch"]))
        return Fsdp2Engine(cell, task, ranks, model, reshards=reshard_after_forward)

    return build


def _prefetch(blocks: list[FSDPModule], ahead: int) -> None:
    """Have each block gather the `ahead` blocks that come after it, in forward and, the other way, in backward."""
    for index, block in enumerate(blocks):
        if ahead:
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])


def refuse(cell: Cell) -> str | None:
    if cell.options["offload"] == "cpu" and cell.max_grad_norm is not None:
        return "offload: NCCL cannot sum the norm of gradients that are in CPU memory. Allowed: leave max_grad_norm out."
    return refuse_replicas(cell) if "replicas" in cell.options else None


OPTIONS = (
    Option("prefetch", 0, "number of blocks that are gathered before their use; 0: torch's default, the next block", least=0),
    Option("offload", "none", "where to keep parameter shards, their gradients and optimizer state", ("none", "cpu")),
)


def _variant(name: str, summary: str, *, reshard_after_forward: bool, replicated: bool) -> Strategy:
    return Strategy(
        name=name,
        summary=summary,
        precisions=SHARDED,
        reasons=REASONS,
        refuse=refuse,
        switches=switches.ALL,
        cuts=("parameter", "gradient", "optimizer_state"),
        options=(*OPTIONS, REPLICAS) if replicated else OPTIONS,
        build=builder(reshard_after_forward=reshard_after_forward, replicated=replicated),
    )


VARIANTS = (
    _variant(
        "fsdp2",
        "parameters, gradients and optimizer state sharded (PyTorch fully_shard; as ZeRO stage 3)",
        reshard_after_forward=True,
        replicated=False,
    ),
    _variant(
        "fsdp2-zero2",
        "as fsdp2, but parameters stay gathered from forward to backward (as ZeRO stage 2)",
        reshard_after_forward=False,
        replicated=False,
    ),
    _variant(
        "fsdp2-hsdp",
        "sharded within a group of ranks, replicated across groups (hybrid sharding)",
        reshard_after_forward=True,
        replicated=True,
    ),
    _variant(
        "fsdp2-hsdp-zero2",
        "as fsdp2-hsdp, but parameters stay gathered from forward to backward",
        reshard_after_forward=False,
        replicated=True,
    ),
)
