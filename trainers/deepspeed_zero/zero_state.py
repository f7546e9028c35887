"""The state of a DeepSpeed engine for checkpoints: fp32 weights and optimizer state, sharded flat over the ranks.

DeepSpeed's own checkpoints are pickles of whole engines, and its public functions for single parameters
(`deepspeed.utils.safe_get_full_fp32_param` and similar) gather each parameter on every rank. The functions of this module use
the memory from which these functions of DeepSpeed read, so that each rank saves and loads only its own shard.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from trainers import model_options
from trainers.checkpointing import state_parts
from trainers.checkpointing.state_parts import State


def make_checkpoint_parts(engine: Any, inner_optimizer: torch.optim.Optimizer, elements_by_id: dict[int, int]) -> State:
    """This rank's parts of the fp32 weights and of the optimizer state.

    engine: the engine of DeepSpeed. inner_optimizer: torch's optimizer, which DeepSpeed's optimizer may wrap.
    elements_by_id: number of
    elements of each whole parameter, by the parameter's id.
    """
    zero_optimizer = engine.optimizer
    named_parameters = [(model_options.plain_name(name), p) for name, p in engine.module.named_parameters()]
    if zero_optimizer is inner_optimizer:
        return state_parts.make_parameter_parts(named_parameters, inner_optimizer)
    if isinstance(zero_optimizer, FP16_UnfusedOptimizer):
        fp32_weights = {
            id(low_weight): fp32_weight
            for low_group, fp32_group in zip(zero_optimizer.fp16_groups, zero_optimizer.fp32_groups)
            for low_weight, fp32_weight in zip(low_group, fp32_group)
        }
        return state_parts.make_parameter_parts([(name, fp32_weights[id(p)]) for name, p in named_parameters], inner_optimizer)
    shards, optimizer_states = [], []
    for name, parameter in named_parameters:
        flat_weights, start, shard_elements, offset = _locate_shard(zero_optimizer, parameter)
        # the share of the last rank may end with padding
        shard_elements = min(shard_elements, elements_by_id[id(parameter)] - offset)
        if shard_elements <= 0:
            continue
        shards.append((name, flat_weights.narrow(0, start, shard_elements), elements_by_id[id(parameter)], offset))
        state_tensors = {key: v for key, v in inner_optimizer.state[flat_weights].items() if isinstance(v, torch.Tensor)}
        optimizer_states.append(
            {k: v.narrow(0, start, shard_elements) if v.shape == flat_weights.shape else v for k, v in state_tensors.items()}
        )
    return state_parts.make_shard_parts(shards, optimizer_states)


def allocate_optimizer_state(engine: Any, inner_optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state. At stage 3, torch's optimizer has its parameters only during a step of
    DeepSpeed, so this function gives the optimizer the parameters for a short time."""
    zero_optimizer = engine.optimizer
    lends_parameters = hasattr(zero_optimizer, "_set_fp32_optimizer_param_groups")
    if lends_parameters:
        zero_optimizer._set_fp32_optimizer_param_groups()
    state_parts.allocate_optimizer_state(inner_optimizer)
    if lends_parameters:
        zero_optimizer._clear_fp32_optimizer_param_groups()


def finish_loading(engine: Any) -> None:
    """Update the model's weights from the fp32 weights. A collective: all ranks call it."""
    zero_optimizer = engine.optimizer
    if isinstance(zero_optimizer, FP16_UnfusedOptimizer):
        for low_group, high_group in zip(zero_optimizer.fp16_groups, zero_optimizer.fp32_groups):
            for low_weight, fp32_weight in zip(low_group, high_group):
                low_weight.data.copy_(fp32_weight.data)
    elif hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        for group_index in range(len(zero_optimizer.fp32_partitioned_groups_flat)):
            zero_optimizer._reassign_or_swap_out_partitioned_parameters(group_index)
        if zero_optimizer.persistent_parameters:
            zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)
    elif hasattr(zero_optimizer, "update_lp_params"):
        zero_optimizer.update_lp_params()


def _locate_shard(zero_optimizer: Any, parameter: Any) -> tuple[torch.Tensor, int, int, int]:
    """Where this rank's shard of a parameter is: (flat tensor of fp32 weights, index of the shard's first element in this
    tensor, number of its elements, index of its first element in the flattened parameter)."""
    if hasattr(parameter, "ds_id"):
        group_index, first_index, element_count = map(int, zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)])
        return (
            zero_optimizer.fp32_partitioned_groups_flat[group_index],
            first_index,
            element_count,
            element_count * zero_optimizer._get_param_partition_rank(parameter),
        )
    flat_groups = (
        zero_optimizer.fp32_groups_flat_partition
        if isinstance(zero_optimizer, BF16_Optimizer)
        else zero_optimizer.single_partition_of_fp32_groups
    )
    mapping = parameter._hp_mapping
    if mapping is None:
        return flat_groups[0], 0, 0, 0
    fp32_address, low_address = mapping.hp_fragment_address, mapping.lp_fragment_address
    return flat_groups[mapping.param_group_index], fp32_address.start, low_address.numel, low_address.start
