"""Builds the engine of ZeRO. Only a rank that does so imports DeepSpeed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardlab.cell import Cell
from shardlab.errors import InputError
from trainers import model_options
from trainers.deferred_init import Deferred
from trainers.dtypes import weight_dtype
from trainers.strategies.zero import quantized

if TYPE_CHECKING:
    from trainers.deepspeed_zero.engine import ZeroEngine
    from trainers.ranks import Ranks
    from trainers.task import Task


def build(cell: Cell, task: Task, ranks: Ranks, *, stage: int) -> ZeroEngine:
    """The engine of this stage. Raises InputError if this rank has no GPU or no compiler and an option needs it."""
    if ranks.device.type == "cpu":
        _refuse_without_gpu(cell)
    os.environ["DS_ACCELERATOR"] = ranks.device.type  # DeepSpeed would guess, aloud
    # DeepSpeed requires LOCAL_RANK even for one process, and uses it as the index of the GPU.
    os.environ["LOCAL_RANK"] = str(ranks.local_rank if ranks.device.index is None else ranks.device.index)
    from trainers.deepspeed_zero import engine  # reads DS_ACCELERATOR

    if (names := quantized(cell)) and not engine.has_quantiser():
        raise InputError(
            f"{names}: DeepSpeed must compile its quantiser, but there is no nvcc on this node (CUDA_HOME, PATH). "
            "Allowed: false, or install the CUDA toolkit of the CUDA version that torch uses."
        )
    # DeepSpeed shards stages 1 and 2 from a whole model in host memory. With hpz (ZeRO++), zero.Init fails the second time
    # in a process, and the proof and the run each call it.
    if stage < 3 or cell.options["hpz_partition_size"] != 1:
        return engine.ZeroEngine(cell, task, ranks, model_options.checkpoint_and_compile(cell, task, task.model()), stage)
    deferred = Deferred(task, ranks, weight_dtype(cell.precision))
    model = model_options.checkpoint_and_compile(cell, task, deferred.model)
    return engine.ZeroEngine(cell, task, ranks, model, stage, deferred)


def _refuse_without_gpu(cell: Cell) -> None:
    if "nvme" in cell.options.values():
        raise InputError("offloading to nvme needs a GPU, and this rank has none. Allowed: cpu.")
    if cell.precision == "fp16":  # DeepSpeed itself does not refuse it on every CPU
        raise InputError("DeepSpeed's fp16 needs a GPU, and this rank has none. Allowed: bf16.")
    if names := quantized(cell):
        raise InputError(f"{names}: DeepSpeed's quantiser needs a GPU, and this rank has none. Allowed: false.")
