"""What engines with PyTorch's FSDP have in common: the mesh of replicas; the passes, bytes and settings of `fully_shard`.

Which blocks are sharded as units: `blocks` of a task (trainers/task.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import LAST_PASS, SHARD_EVERY_PASS
from trainers.dtypes import cast_dtype, dtype_name
from trainers.replicated import ReplicatedEngine

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks


class FullyShardedEngine(ReplicatedEngine):
    """An engine whose model is sharded by `fully_shard`, which also casts the weights to the cell's precision."""

    casts_itself = True

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        # If ranks reduce gradients only in the last pass, they send less, but need memory for whole gradients.
        model = cast("FSDPModule", self.model)
        model.set_requires_gradient_sync(last or self.cell.sync != LAST_PASS)
        if self.cell.sync == SHARD_EVERY_PASS:
            model.set_requires_all_reduce(last)
        return nullcontext()


def make_replicas_mesh(cell: Cell, ranks: Ranks) -> DeviceMesh:
    """The 2-D mesh (replicas, shards). Ranks of a replica have consecutive numbers, so they are on one node if possible."""
    return ranks.make_mesh((ranks.world_size // cell.shards, cell.shards), ("replicas", "shards"))


def make_mixed_precision_policy(precision: str) -> MixedPrecisionPolicy:
    """The policy of `fully_shard` for a precision: the dtypes in which it gathers parameters and reduces gradients."""
    low_dtype = cast_dtype(precision)
    return MixedPrecisionPolicy(param_dtype=low_dtype, reduce_dtype=torch.float32) if low_dtype else MixedPrecisionPolicy()


def count_padded_elements(shape: torch.Size, rank_count: int) -> int:
    """The number of elements of a parameter when it is sharded over ranks: its rows are padded to a multiple of
    `rank_count`."""
    row_count = shape[0] if shape else 1
    return shape.numel() // row_count * -(-row_count // rank_count) * rank_count


def read_effective_settings(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, Any]:
    """How `fully_shard` has sharded a model, for `knobs.effective` of result.json. blocks: the separately sharded blocks.

    The settings are read from private fields, because torch has no public interface for them. The version of torch is pinned,
    and a test reads these fields. torch 2.11 and earlier have another name for the groups of a module.
    """
    group_by_id = {
        id(module): group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _list_parameter_groups(module._get_fsdp_state())
    }
    policies = {group.mp_policy for group in group_by_id.values()}
    assert len(policies) == 1, f"one policy was given to all groups, found {policies}"
    policy, stored_dtype = policies.pop(), next(model.parameters()).dtype
    return {
        "reshard_after_forward": all(group_by_id[id(block)].post_forward_mesh_info is not None for block in blocks),
        "sharded_groups": len(group_by_id),
        "parameters_gathered_as": dtype_name(policy.param_dtype or stored_dtype),
        "gradients_reduced_as": dtype_name(policy.reduce_dtype or stored_dtype),
    }


def _list_parameter_groups(fsdp_state: Any) -> list[Any]:
    groups = getattr(fsdp_state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if fsdp_state._fsdp_param_group is None else [fsdp_state._fsdp_param_group]
    return list(groups)
