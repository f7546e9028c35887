"""FSDP1 (`FullyShardedDataParallel`): flat parameters sharded over the ranks, as in the published studies of FSDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import LAST_PASS
from trainers.model.precision import CAST, REASONS, SHARDED
from trainers.strategies.fsdp2 import REPLICAS, SYNC, refuse_replicas
from trainers.strategy import Strategy
from trainers.strategy_options import Fsdp1Options
from trainers.theory.fsdp import divide_fsdp1, list_fsdp1_terms

WITHOUT_GPU = "FSDP1 copies offloaded parameters to a GPU and back, and the ranks of this run have no GPU. Allowed: none."
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def make_refuse(sharding: str) -> Callable[[Cell], str | None]:
    """The function `refuse` of a strategy with this sharding. sharding: a name of FSDP's `ShardingStrategy`."""

    def refuse(cell: Cell) -> str | None:
        offloads = Fsdp1Options(cell.options).offload == "cpu"
        # With one rank, torch changes every sharding to NO_SHARD.
        if (sharding == "NO_SHARD" or cell.gpus == 1) and cell.precision in CAST and cell.gradient_accumulation_steps > 1:
            return (
                f"FSDP1 without shards keeps {cell.precision} gradients between micro-batches; torch 2.13 needs fp32 there and "
                "fails. Allowed: gradient_accumulation_steps of 1, or another strategy."
            )
        if offloads and cell.launcher == "fork":
            return f"offload: {WITHOUT_GPU}"
        if offloads and cell.sync != LAST_PASS and cell.gradient_accumulation_steps > 1:
            return (
                f"sync: found {cell.sync} with offload: cpu and several passes per step, where FSDP1 replaces the gradient of "
                f"earlier passes instead of adding to it. Allowed: {LAST_PASS}, offload: none, or fsdp2."
            )
        return refuse_replicas(cell) if sharding in HYBRID else None

    return refuse


OPTIONS = (*Fsdp1Options.list_options(), SYNC)


def _make_strategy(name: str, sharding: str, summary: str) -> Strategy:
    return Strategy(
        name=f"fsdp1-{name}",
        summary=summary,
        precisions=SHARDED,
        reasons=REASONS,
        refuse=make_refuse(sharding),
        engine="trainers.engines.fsdp1",
        settings={"sharding": sharding},
        options=(*OPTIONS, REPLICAS) if sharding in HYBRID else OPTIONS,
        switches=("activation_checkpointing", "max_grad_norm"),
        cuts=() if sharding == "NO_SHARD" else ("parameter", "gradient", "optimizer_state"),
        theory_of_memory=partial(divide_fsdp1, sharding=sharding),
        theory_of_communication=partial(list_fsdp1_terms, sharding=sharding),
    )


VARIANTS = (
    _make_strategy(
        "full-shard", "FULL_SHARD", "PyTorch FSDP1: parameters, gradients and optimizer state sharded (as ZeRO stage 3)"
    ),
    _make_strategy("shard-grad-op", "SHARD_GRAD_OP", "FSDP1 that keeps parameters gathered until backward (as ZeRO stage 2)"),
    _make_strategy("no-shard", "NO_SHARD", "FSDP1 that shards nothing (as DDP, without its buckets)"),
    _make_strategy("hybrid-shard", "HYBRID_SHARD", "FSDP1 that shards within a group of ranks and replicates across groups"),
    _make_strategy(
        "hybrid-shard-zero2", "_HYBRID_SHARD_ZERO2", "as fsdp1-hybrid-shard, but parameters stay gathered until backward"
    ),
)
