"""How a strategy divides a model over its ranks: what each rank holds of parameters, gradients and optimizer state.

The numbers describe the engines of this project (docs/strategies.md) more exactly than textbooks do: for example, FSDP adds up
whole gradients if a step has several passes, and DeepSpeed keeps a second copy of the weights.
"""

from __future__ import annotations

import functools
from typing import Literal, cast

import msgspec

from shardlab.matrix.cell import Cell
from trainers import menu
from trainers.model import precision
from trainers.strategy import Strategy

Gathers = Literal["nothing", "blocks", "everything"]


class Division(msgspec.Struct, frozen=True):
    """What a rank holds, before tensor and pipeline parallelism are taken into account (memory.py does this).

    Fields named ..._bytes are per parameter of the rank's part of the model. Fields named ..._ranks: over how many ranks these
    bytes are sharded.
    """

    weight_bytes: int
    weight_ranks: int = 1
    gradient_bytes: int = 4
    gradient_ranks: int = 1
    whole_gradient_bytes: int = 0
    """Bytes of a second gradient that each rank keeps whole during a step: with FSDP the sum over the passes, with DeepSpeed
    the gradient in 16 bits."""
    master_bytes: int = 0
    """Bytes of the optimizer's own copy of the weights."""
    optimizer_ranks: int = 1
    """The number of ranks over which the optimizer state and the optimizer's copy of the weights are sharded; 0: they are not
    on the GPU."""
    copy_bytes: int = 0
    """Bytes of a copy of all weights in the precision of the computation."""
    gathers: Gathers = "nothing"
    """nothing: a rank gathers no weights. blocks: a rank gathers the weights of a block before it uses them, and then frees
    them. everything: the gathered weights of all blocks stay in memory together."""
    gathered_bytes: int = 0
    keeps_gradients: bool = False
    """Whether gradients are already in memory when the last backward of a step begins, because they stay allocated between
    steps or come from earlier passes of the step."""
    bucket_bytes: float = 0.0
    """Bytes of buffers of collectives on the rank, in total and not per parameter; they do not depend on the batch."""
    bucket_parameters: float = 0.0
    """Bytes of further buffers of collectives, per parameter of the rank's part of the model."""


@functools.cache
def find_strategy(name: str) -> Strategy:
    """The strategy with this name. The result is cached, because a plan may have thousands of cells."""
    return menu.strategy(name)


@functools.cache
def _task_names() -> dict[str, str]:
    return {workload.name: workload.task.rpartition(".")[2] for workload in menu.workloads().values()}


def find_task_name(cell: Cell) -> str:
    """The name of the task of a cell's workload, such as `gpt2`; '' for a workload that a workspace defines itself."""
    return "" if cell.workload_code is not None else _task_names().get(cell.workload, "")


def count_shards(cell: Cell) -> int:
    """The number of ranks over which one copy of the model is sharded by data-parallel strategies."""
    replicas = cell.options.get("replicas")
    return cell.dp // replicas if isinstance(replicas, int) and replicas else cell.dp


def divide(cell: Cell, parameters: int) -> Division:
    """How the strategy of a cell divides the model. parameters: the number of parameters of the whole model, from which the
    size of DeepSpeed's buckets follows."""
    engine = find_strategy(cell.strategy).engine.rpartition(".")[2]
    weight, computed = precision.weight_bytes(cell.precision), precision.computed_bytes(cell.precision)
    copy = computed if cell.precision in precision.CAST else 0
    accumulates = cell.gradient_accumulation_steps > 1
    if engine == "zero":
        return _divide_zero(cell, parameters)
    if engine in ("fsdp1", "fsdp2") or (engine == "mesh" and "dp" in find_strategy(cell.strategy).degrees):
        return _divide_fsdp(cell, engine)
    if engine == "parameter_server":
        # A worker flattens the gradient that it pushes and the parameters that it pulls; servers update on the CPU.
        return Division(
            weight, 1, weight, 1, optimizer_ranks=0, copy_bytes=copy, keeps_gradients=accumulates, bucket_parameters=weight
        )
    if engine == "ddp":
        uses_views = cell.options.get("gradient_as_bucket_view", True) is True
        buckets = 0 if uses_views else weight
        return Division(weight, 1, weight, 1, copy_bytes=copy, keeps_gradients=True, bucket_parameters=buckets)
    if engine in ("single", "tensor", "pipeline", "mesh"):
        return Division(weight, 1, weight, 1, copy_bytes=copy, keeps_gradients=accumulates)
    return _divide_by_cuts(cell, weight, copy, keeps_gradients=accumulates)


def _divide_by_cuts(cell: Cell, weight: int, copy: int, *, keeps_gradients: bool) -> Division:
    """The division for an engine that this module does not describe, from the entry `cuts` of the strategy in the menu, which
    lists what the strategy shards."""
    cuts, ranks = find_strategy(cell.strategy).cuts or (), count_shards(cell)
    ranks_by_part = {part: ranks if part in cuts else 1 for part in ("parameter", "gradient", "optimizer_state")}
    return Division(
        weight,
        ranks_by_part["parameter"],
        weight,
        ranks_by_part["gradient"],
        optimizer_ranks=ranks_by_part["optimizer_state"],
        copy_bytes=0 if ranks_by_part["parameter"] > 1 else copy,
        gathers="blocks" if ranks_by_part["parameter"] > 1 else "nothing",
        gathered_bytes=copy or weight,
        keeps_gradients=keeps_gradients,
    )


def _divide_fsdp(cell: Cell, engine: str) -> Division:
    weight, computed = precision.weight_bytes(cell.precision), precision.computed_bytes(cell.precision)
    ranks = count_shards(cell)
    settings = find_strategy(cell.strategy).settings
    accumulates = cell.gradient_accumulation_steps > 1
    if settings.get("sharding") == "NO_SHARD":
        return Division(weight, 1, weight, 1, copy_bytes=computed if computed < weight else 0, keeps_gradients=accumulates)
    frees_gathered = settings.get("reshard_after_forward", settings.get("sharding") in ("FULL_SHARD", "HYBRID_SHARD"))
    if engine == "mesh":
        frees_gathered = "pp" not in find_strategy(cell.strategy).degrees  # a pipeline keeps weights until its last micro-batch
    is_one_unit = cell.options.get("wrap") == "none"
    offloads = cell.options.get("offload") == "cpu"
    return Division(
        0 if offloads else weight,
        ranks,
        0 if offloads else weight,
        ranks,
        whole_gradient_bytes=weight if accumulates else 0,
        optimizer_ranks=0 if offloads else ranks,
        gathers="blocks" if frees_gathered and not is_one_unit else "everything",
        gathered_bytes=computed,
        keeps_gradients=accumulates,
    )


BUCKET_ELEMENTS = 50_000_000  # the default of the option reduce_bucket_size of the ZeRO strategies
USES_PER_PASS = 2  # a pass uses each parameter twice: if all parameters fit twice into max_reuse_distance, DeepSpeed frees none


def _divide_zero(cell: Cell, parameters: int) -> Division:
    """The division of DeepSpeed's ZeRO: the weights are in the precision of the computation, and the optimizer keeps fp32
    copies of the rank's part of them."""
    stage = cast("int", find_strategy(cell.strategy).settings["stage"])
    options, ranks = cell.options, cell.dp
    computed = precision.computed_bytes(cell.precision)
    pure = cell.precision == "bf16-pure"
    master = 0 if pure or (computed == 4 and stage == 0) else 4
    sent_bytes = 2 if options.get("communication_dtype") == "bf16" or pure else 4
    bucket = min(parameters, cast("int", options.get("reduce_bucket_size") or BUCKET_ELEMENTS))
    buckets = bucket * sent_bytes * (2 if options.get("overlap_comm") else 1) if stage else 0
    state_ranks = 0 if options.get("offload_optimizer", "none") != "none" else ranks if stage else 1
    accumulates = cell.gradient_accumulation_steps > 1
    if stage < 2:
        # With 16-bit precision, stages 0 and 1 keep all gradients in fp32, in addition to the 16-bit gradients (docs/gpus.md).
        whole_bytes = computed if computed == 2 else 0
        return Division(
            computed, 1, 4 if not pure else 2, 1, whole_bytes, master, state_ranks, keeps_gradients=True, bucket_bytes=buckets
        )
    if stage == 2:
        return Division(
            computed, 1, 4 if not pure else 2, ranks, 0, master, state_ranks, keeps_gradients=accumulates, bucket_bytes=buckets
        )
    partition_size = cast("int", options.get("hpz_partition_size", 1))
    offloaded = options.get("offload_param", "none") != "none"
    reuse_limit, live_limit = cast("int", options["max_reuse_distance"]), cast("int", options["max_live_parameters"])
    stays_gathered = USES_PER_PASS * parameters <= reuse_limit and parameters <= live_limit
    return Division(
        0 if offloaded else computed + (computed * ranks // partition_size if partition_size > 1 else 0),
        ranks,
        4 if not pure else 2,
        ranks,
        0,
        master,
        state_ranks,
        gathers="everything" if stays_gathered else "blocks",
        gathered_bytes=computed,
        keeps_gradients=accumulates,
        bucket_bytes=buckets,
    )
