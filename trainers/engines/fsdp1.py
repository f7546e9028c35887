"""The engine of FSDP1 (`FullyShardedDataParallel`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from shardlab.errors import InputError
from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import LAST_PASS
from trainers import model_options
from trainers.checkpointing import state_parts
from trainers.dtypes import cast_dtype, dtype_name, weight_dtype
from trainers.model import activation_checkpointing
from trainers.model.deferred_init import DeferredModel
from trainers.model.precision import weight_bytes
from trainers.parallel.fsdp import make_replicas_mesh
from trainers.replicated import ReplicatedEngine
from trainers.strategies.fsdp1 import HYBRID, WITHOUT_GPU
from trainers.strategy_options import Fsdp1Options
from trainers.theory.fsdp import RESHARDING, list_fsdp1_terms
from trainers.theory.term import ModelPart, Term

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class Fsdp1Engine(ReplicatedEngine):
    casts_itself = True

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module, sizes: tuple[int, int], sharding: str) -> None:
        super().__init__(cell, task, ranks, model)
        self._block_elements, self._rest_elements = sizes  # in the FSDP units of blocks, and in the outermost FSDP unit
        self._sharding = sharding

    @property
    def _fsdp_model(self) -> FullyShardedDataParallel:
        return cast("FullyShardedDataParallel", self.model)

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or self.cell.sync != LAST_PASS else self._fsdp_model.no_sync()

    def clip(self, max_norm: float) -> None:
        self._fsdp_model.clip_grad_norm_(max_norm)

    def sum_overflow(self, overflowed: torch.Tensor) -> torch.Tensor:
        if self._sharding != "NO_SHARD":
            dist.all_reduce(overflowed, group=self._fsdp_model.process_group)
        return overflowed

    def gradient_norm(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]  # this rank's shards, perhaps on the CPU
        squared_norms = [gradient.float().square().sum().to(self.device) for gradient in gradients]
        square_sum = torch.stack([torch.zeros((), device=self.device), *squared_norms]).sum()
        if self._sharding != "NO_SHARD":
            dist.all_reduce(square_sum, group=self._fsdp_model.process_group)
        return float(square_sum.sqrt())

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return model_options.gather_whole_parameters(self.model)

    def make_state_parts(self) -> State:
        if self._sharding == "NO_SHARD":
            return super().make_state_parts()
        name_by_id = {id(p): model_options.plain_name(name) for name, p in self.model.named_parameters()}
        shards, optimizer_states = [], []
        for unit in FullyShardedDataParallel.fsdp_modules(self.model):
            # No public interface tells which part of a parameter a flat shard has, so private fields are read. The version of
            # torch is pinned, and a test resumes a run with FSDP1.
            flat = unit._handle.flat_param  # type: ignore[union-attr]
            for parameter, shard_info, shape in zip(flat._params or (), flat._shard_param_infos, flat._shapes):
                if shard_info.in_shard:
                    shards.append((name_by_id[id(parameter)], parameter, shape.numel(), shard_info.intra_param_start_idx or 0))
                    optimizer_states.append(self.optimizer.state[parameter])
        return {**state_parts.make_shard_parts(shards, optimizer_states), **state_parts.make_buffer_parts(self.model)}

    def count_parameters(self) -> int:
        return self._block_elements + self._rest_elements

    def theory(self) -> list[Term]:
        model_part = ModelPart(elements=self.count_parameters(), block_elements=self._block_elements)
        return list_fsdp1_terms(self.cell, model_part, sharding=self._sharding)

    def compute_textbook_bytes(self) -> float:
        return (3 if self._sharding in RESHARDING else 2) * float(weight_bytes(self.cell.precision)) * self.count_parameters()

    def effective(self) -> dict[str, Any]:
        units = FullyShardedDataParallel.fsdp_modules(self.model)
        fsdp_model = self._fsdp_model
        prefetch, parameter_dtype = fsdp_model.backward_prefetch, next(self.model.parameters()).dtype
        return {
            **super().effective(),
            "sharding": ", ".join(sorted({unit.sharding_strategy.name for unit in units})),
            "units": len(units),
            "shard_parameters": sum(p.numel() for p in self.model.parameters()),
            "ranks_of_a_shard_group": cast("ProcessGroup", fsdp_model.process_group).size(),
            "backward_prefetch": prefetch.name if prefetch else None,
            "forward_prefetch": fsdp_model.forward_prefetch,
            "limit_all_gathers": fsdp_model.limit_all_gathers,
            "parameters_gathered_as": dtype_name(fsdp_model.mixed_precision.param_dtype or parameter_dtype),
            "gradients_reduced_as": dtype_name(fsdp_model.mixed_precision.reduce_dtype or parameter_dtype),
        }


def build(cell: Cell, task: Task, ranks: Ranks, *, sharding: str) -> Fsdp1Engine:
    """Build the engine of a variant of FSDP1. sharding: the name of a member of FSDP's `ShardingStrategy`."""
    options = Fsdp1Options(cell.options)
    if options.offload == "cpu" and ranks.device.type == "cpu":
        raise InputError(f"offload: {WITHOUT_GPU}")
    mesh = make_replicas_mesh(cell, ranks) if sharding in HYBRID else None
    deferred = DeferredModel(task, ranks, weight_dtype(cell.precision))
    model = model_options.checkpoint_and_compile(cell, task, deferred.model)
    blocks = activation_checkpointing.list_block_units(task, model) if options.wrap == "block" else []
    block_ids = {id(block) for block in blocks}
    block_elements = sum(p.numel() for block in blocks for p in block.parameters())
    element_counts = block_elements, sum(p.numel() for p in model.parameters()) - block_elements
    low_dtype = cast_dtype(cell.precision)
    mixed_precision = MixedPrecision(
        param_dtype=low_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=True,
        _module_classes_to_ignore=(),  # FSDP1's default excludes BatchNorm from casting; no other strategy excludes it
    )
    prefetch_by_option = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    fsdp_model = FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[sharding],
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in block_ids) if block_ids else None,
        mixed_precision=mixed_precision if low_dtype else None,
        cpu_offload=CPUOffload(offload_params=options.offload == "cpu"),
        backward_prefetch=prefetch_by_option[options.backward_prefetch],
        forward_prefetch=options.forward_prefetch,
        limit_all_gathers=options.limit_all_gathers,
        use_orig_params=True,
        param_init_fn=deferred.fill_module,
        sync_module_states=False,  # `deferred.fill_module` broadcasts the weights
        device_id=ranks.device,  # also on a CPU, because without device_id FSDP searches for an accelerator
    )
    return Fsdp1Engine(cell, task, ranks, fsdp_model, element_counts, sharding)
