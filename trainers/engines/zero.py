"""Builds the engine of ZeRO. DeepSpeed is imported only when an engine is built."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardlab.errors import InputError
from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.dtypes import weight_dtype
from trainers.model.deferred_init import DeferredModel
from trainers.strategies.zero import name_quantizing_options
from trainers.strategy_options import Zero3Options

if TYPE_CHECKING:
    from trainers.deepspeed_zero.engine import ZeroEngine
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


def build(cell: Cell, task: Task, ranks: Ranks, *, stage: int) -> ZeroEngine:
    """The engine of a ZeRO stage (0 to 3). Raises InputError if an option needs a GPU or a compiler, and this rank has none."""
    if ranks.device.type == "cpu":
        _refuse_without_gpu(cell)
    os.environ["DS_ACCELERATOR"] = ranks.device.type  # else DeepSpeed guesses the device, and logs messages
    # DeepSpeed requires LOCAL_RANK even for one process, and uses it as the index of the GPU.
    os.environ["LOCAL_RANK"] = str(ranks.local_rank if ranks.device.index is None else ranks.device.index)
    from trainers.deepspeed_zero import engine  # this import reads DS_ACCELERATOR

    if (option_names := name_quantizing_options(cell)) and not engine.has_quantiser():
        raise InputError(
            f"{option_names}: DeepSpeed must compile its quantiser, but there is no nvcc on this node (CUDA_HOME, PATH). "
            "Allowed: false, or install the CUDA toolkit of the CUDA version that torch uses."
        )
    # Stages 1 and 2 of DeepSpeed need a whole model in host memory. With hpz (ZeRO++), the second call of zero.Init in a
    # process fails, and the proof and the run each need a call. Therefore deferred initialization is not used in these cases.
    if stage < 3 or Zero3Options(cell.options).hpz_partition_size != 1:
        return engine.ZeroEngine(cell, task, ranks, model_options.checkpoint_and_compile(cell, task, task.model()), stage)
    deferred = DeferredModel(task, ranks, weight_dtype(cell.precision))
    model = model_options.checkpoint_and_compile(cell, task, deferred.model)
    return engine.ZeroEngine(cell, task, ranks, model, stage, deferred)


def _refuse_without_gpu(cell: Cell) -> None:
    if "nvme" in cell.options.values():
        raise InputError("offloading to nvme needs a GPU, and this rank has none. Allowed: cpu.")
    if cell.precision == "fp16":  # checked here, because DeepSpeed itself does not refuse fp16 on every CPU
        raise InputError("DeepSpeed's fp16 needs a GPU, and this rank has none. Allowed: bf16.")
    if names := name_quantizing_options(cell):
        raise InputError(f"{names}: DeepSpeed's quantiser needs a GPU, and this rank has none. Allowed: false.")
