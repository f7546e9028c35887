"""The engine of FSDP2 (`fully_shard`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.dtypes import weight_dtype
from trainers.model import activation_checkpointing
from trainers.model.deferred_init import DeferredModel
from trainers.model.precision import weight_bytes
from trainers.parallel import fsdp
from trainers.parallel.fsdp import FullyShardedEngine, make_replicas_mesh
from trainers.strategy_options import Fsdp2Options
from trainers.theory.fsdp import list_fsdp2_terms
from trainers.theory.term import ModelPart, Term

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class Fsdp2Engine(FullyShardedEngine):
    """Each rank runs the whole model on its slice of the batch. A block is gathered when it is needed."""

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module, *, reshards: bool) -> None:
        super().__init__(cell, task, ranks, model)
        self._reshards = reshards  # whether blocks are freed after forward, so that backward gathers them again
        self._offloaded = Fsdp2Options(cell.options).offload == "cpu"

    def theory(self) -> list[Term]:
        blocks = {id(p) for block in self.task.blocks(self.model) for p in block.parameters()}
        sizes = [(id(p) in blocks, fsdp.count_padded_elements(p.shape, self.cell.shards)) for p in self.model.parameters()]
        block_elements = sum(size for is_in_block, size in sizes if is_in_block)
        model_part = ModelPart(elements=sum(size for _, size in sizes), block_elements=block_elements)
        return list_fsdp2_terms(self.cell, model_part, reshards=self._reshards)

    def sum_overflow(self, overflowed: torch.Tensor) -> torch.Tensor:
        mesh = cast("DTensor", next(self.model.parameters())).device_mesh
        dist.all_reduce(overflowed, group=mesh.get_group(mesh.ndim - 1))  # summed only within a replica: all replicas are equal
        return overflowed

    def gradient_norm(self) -> float:
        if not self._offloaded:
            return super().gradient_norm()
        gradients = [cast("DTensor", p.grad) for p in self.model.parameters() if p.grad is not None]
        square_sum = torch.stack([gradient.to_local().float().square().sum() for gradient in gradients]).sum().to(self.device)
        mesh = gradients[0].device_mesh
        dist.all_reduce(square_sum, group=mesh.get_group(mesh.ndim - 1))  # it is on the GPU: NCCL reduces no CPU tensors
        return float(square_sum.sqrt())

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        if not self._offloaded:
            return super().whole_parameters()
        weights = {}
        for name, parameter in cast("Iterable[tuple[str, DTensor]]", self.model.named_parameters()):
            local_shard, mesh = parameter.to_local().to(self.device), parameter.device_mesh
            shape, stride = parameter.shape, parameter.stride()
            on_device = DTensor.from_local(local_shard, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
            weights[model_options.plain_name(name)] = on_device.full_tensor().detach().float().cpu().clone()
        return weights

    def compute_textbook_bytes(self) -> float:
        parameter_bytes = float(weight_bytes(self.cell.precision)) * self.count_parameters()
        return (3 if self._reshards else 2) * parameter_bytes

    def effective(self) -> dict[str, Any]:
        wrapped_modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        return {
            **super().effective(),
            **fsdp.read_effective_settings(self.model, activation_checkpointing.list_block_units(self.task, self.model)),
            "mesh": list(next(self.model.parameters()).device_mesh.shape),  # type: ignore[attr-defined]
            "prefetch": max(len(module._get_fsdp_state()._states_to_forward_prefetch) for module in wrapped_modules),
            "parameters_on": str(next(self.model.parameters()).device),
            "shard_parameters": sum(p.to_local().numel() for p in self.model.parameters()),  # type: ignore[attr-defined]
        }


def build(cell: Cell, task: Task, ranks: Ranks, *, reshard_after_forward: bool, replicated: bool) -> Fsdp2Engine:
    """Build the engine of a variant of FSDP2.

    reshard_after_forward: free the gathered parameters of a block after forward and gather them again for backward; if false,
    they are kept for backward. replicated: shard over the ranks of each replica (a 2-D mesh), not over all ranks.
    """
    mesh = make_replicas_mesh(cell, ranks) if replicated else ranks.make_mesh((ranks.world_size,))
    cpu_offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    shard_options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": fsdp.make_mixed_precision_policy(cell.precision),
        "offload_policy": cpu_offload if Fsdp2Options(cell.options).offload == "cpu" else OffloadPolicy(),
    }
    deferred = DeferredModel(task, ranks, weight_dtype(cell.precision))
    model = model_options.checkpoint_and_compile(cell, task, deferred.model)
    blocks = activation_checkpointing.list_block_units(task, model)
    for block in blocks:
        deferred.fill_module(block)
        fully_shard(block, reshard_after_forward=reshard_after_forward, **shard_options)
    # Parameters outside of blocks (embeddings, head) are not freed after forward, because backward needs them at once.
    deferred.fill_module(model)
    fully_shard(model, reshard_after_forward=False, **shard_options)
    _set_prefetching(cast("list[FSDPModule]", blocks), Fsdp2Options(cell.options).prefetch)
    return Fsdp2Engine(cell, task, ranks, model, reshards=reshard_after_forward)


def _set_prefetching(blocks: list[FSDPModule], blocks_ahead: int) -> None:
    """Make each block start to gather the next `blocks_ahead` blocks: the blocks after it in forward, the blocks before it
    in backward."""
    for index, block in enumerate(blocks):
        if blocks_ahead:
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + blocks_ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - blocks_ahead) : index][::-1])
