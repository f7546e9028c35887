"""Reads from the private state of `fully_shard` how a model is sharded. torch has no public interface for this."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainers.precision import dtype_name

if TYPE_CHECKING:
    from torch import nn


def effective(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, Any]:
    """How a model is sharded, for a run's `knobs.effective`. blocks: those that are sharded one by one.

    torch is pinned, and a test reads these private fields. torch 2.11 and earlier have another name for the groups of a module.
    """
    from torch.distributed.fsdp import FSDPModule

    groups = {
        id(module): group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _groups(module._get_fsdp_state())
    }
    policies = {group.mp_policy for group in groups.values()}
    assert len(policies) == 1, f"one policy was given to all groups, found {policies}"
    policy, weights = policies.pop(), next(model.parameters()).dtype
    return {
        "reshard_after_forward": all(groups[id(block)].post_forward_mesh_info is not None for block in blocks),
        "sharded_groups": len(groups),
        "parameters_gathered_as": dtype_name(policy.param_dtype or weights),
        "gradients_reduced_as": dtype_name(policy.reduce_dtype or weights),
    }


def _groups(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:
        found = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(found)
