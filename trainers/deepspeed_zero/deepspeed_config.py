"""Makes DeepSpeed's configuration from a cell. All relevant keys are set, so that no default of DeepSpeed changes a run."""

from __future__ import annotations

import math
from typing import Any

from shardlab.matrix.cell import Cell
from trainers.model import loss_scaling
from trainers.strategy_options import Zero3Options, ZeroOptions
from trainers.theory.zero import BUCKET_ELEMENTS, count_sent_gradient_bytes

NEVER = 10**9  # a number of steps that no run reaches


def make_config(cell: Cell, stage: int, *, element_count: int, pin_memory: bool) -> dict[str, Any]:
    """The configuration for a cell and a ZeRO stage.

    element_count: number of elements of all parameters of the model. pin_memory: whether offloaded tensors are in pinned
    memory.
    """
    is_pure, is_fp16 = cell.precision == "bf16-pure", cell.precision == "fp16"
    is_bf16 = cell.precision == "bf16" or is_pure
    config: dict[str, Any] = {
        "train_batch_size": cell.global_batch_size,
        "train_micro_batch_size_per_gpu": cell.micro_batch_size,
        "gradient_accumulation_steps": cell.gradient_accumulation_steps,
        "gradient_clipping": cell.max_grad_norm or 0.0,  # 0 switches clipping off; without this key, DeepSpeed clips at 1.0
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "bf16" if count_sent_gradient_bytes(cell) == 2 else "fp32",
        "bf16": {
            "enabled": is_bf16,
            "check_grad_overflow": True,
            "bf16_master_weights_and_grads": is_pure,
            "bf16_optimizer_states": is_pure,
        },
        "fp16": {"enabled": is_fp16, **(_make_dynamic_scale_keys() if is_fp16 else {})},
        "torch_autocast": {"enabled": False},
        # The optimizer is torch's optimizer, made by trainers.model.optimization, as for every other strategy.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **_make_zero_section(cell, stage, element_count, pin_memory)},
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "disable_python_gc": False,
    }
    if cell.precision in ("bf16", "fp16") and stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # at stage 0, DeepSpeed can accumulate only in 16 bits
    return config


def _make_dynamic_scale_keys() -> dict[str, Any]:
    """The keys that make DeepSpeed scale losses by the rule of trainers.model.loss_scaling, as far as DeepSpeed can do this.
    Unlike that rule, DeepSpeed stops the run if the scale is too small."""
    return {
        "auto_cast": True,  # DeepSpeed casts the inputs to fp16, because images come in fp32
        "loss_scale": 0,  # 0: the scale is dynamic
        "initial_scale_power": int(math.log2(loss_scaling.START_SCALE)),
        "loss_scale_window": loss_scaling.GROWTH_INTERVAL,
        "hysteresis": 1,  # number of overflows after which the scale is halved
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    }


def _make_zero_section(cell: Cell, stage: int, element_count: int, pin_memory: bool) -> dict[str, Any]:
    """The part `zero_optimization` of the configuration: buckets (sizes in elements), prefetching, ZeRO++ and offloading."""
    if stage == 0:
        return {}
    options, stage_3_options = ZeroOptions(cell.options), Zero3Options(cell.options)
    default_bucket = min(element_count + element_count % 2, BUCKET_ELEMENTS)  # DeepSpeed refuses buckets of odd size
    zero_section: dict[str, Any] = {
        "reduce_bucket_size": options.reduce_bucket_size or default_bucket,
        "overlap_comm": options.overlap_comm,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "ignore_unused_parameters": True,
        "round_robin_gradients": False,
    }
    if stage < 3:
        zero_section |= {
            "allgather_bucket_size": options.allgather_bucket_size or default_bucket,
            "allgather_partitions": True,
            "use_multi_rank_bucket_allreduce": True,
        }
    else:
        zero_section |= {
            "stage3_prefetch_bucket_size": stage_3_options.prefetch_bucket_size,
            "stage3_param_persistence_threshold": stage_3_options.param_persistence_threshold,
            "stage3_max_reuse_distance": stage_3_options.max_reuse_distance,
            "stage3_max_live_parameters": stage_3_options.max_live_parameters,
            "stage3_module_granularity_threshold": 0,
            "stage3_use_all_reduce_for_fetch_params": False,
            "sub_group_size": 1_000_000_000,  # number of elements that the optimizer updates at a time
            "zero_hpz_partition_size": stage_3_options.hpz_partition_size,
            "zero_quantized_weights": stage_3_options.quantized_weights,
            "zero_quantized_nontrainable_weights": False,
            "zero_quantized_gradients": stage_3_options.quantized_gradients,
        }
    for name, device in (("offload_optimizer", options.offload_optimizer), ("offload_param", stage_3_options.offload_param)):
        if device != "none":
            nvme_keys = {"nvme_path": stage_3_options.nvme_path} if device == "nvme" else {}
            zero_section[name] = {"device": device, "pin_memory": pin_memory, **nvme_keys}
    return zero_section
