"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state sharded over the ranks, gathered block by block."""

from __future__ import annotations

from functools import partial

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import EVERY_PASS, LAST_PASS, SHARD_EVERY_PASS
from shardlab.registry import Option
from trainers.model.precision import REASONS, SHARDED
from trainers.strategy import SWITCHES, Strategy
from trainers.strategy_options import Fsdp2Options
from trainers.theory.fsdp import divide_sharded, list_fsdp2_terms


def refuse(cell: Cell) -> str | None:
    if Fsdp2Options(cell.options).offload == "cpu" and cell.max_grad_norm is not None:
        return "offload: NCCL cannot sum the norm of gradients that are in CPU memory. Allowed: leave max_grad_norm out."
    return refuse_replicas(cell) if "replicas" in cell.options else None


def refuse_replicas(cell: Cell) -> str | None:
    """Why the ranks of a cell cannot be divided into the replicas, as a sentence, or None."""
    replicas = cell.options["replicas"]
    if isinstance(replicas, int) and replicas >= 2 and cell.gpus % replicas == 0 and cell.gpus // replicas >= 2:
        return None
    return (
        f"replicas: found {replicas} on {cell.gpus} ranks. Allowed: a divisor of {cell.gpus} from 2 that leaves each replica "
        "at least 2 ranks."
    )


SYNC = Option(
    "sync",
    LAST_PASS,
    "the passes of a step that reduce gradients: last_pass (until then, each rank keeps whole gradients) or every_pass",
    (LAST_PASS, EVERY_PASS),
)
SYNC_OF_REPLICAS = msgspec.structs.replace(
    SYNC,
    summary=f"{SYNC.summary}; shard_every_pass: every_pass in a group of shards, last_pass among replicas",
    choices=(*SYNC.choices, SHARD_EVERY_PASS),
)
REPLICAS = Option("replicas", 2, "number of groups of ranks; each group holds one sharded copy of the model", least=2)
OPTIONS = Fsdp2Options.list_options()


def _make_strategy(name: str, summary: str, *, reshard_after_forward: bool, replicated: bool) -> Strategy:
    return Strategy(
        name=name,
        summary=summary,
        precisions=SHARDED,
        reasons=REASONS,
        refuse=refuse,
        switches=SWITCHES,
        cuts=("parameter", "gradient", "optimizer_state"),
        theory_of_memory=partial(divide_sharded, reshards=reshard_after_forward),
        theory_of_communication=partial(list_fsdp2_terms, reshards=reshard_after_forward),
        options=(*OPTIONS, SYNC_OF_REPLICAS, REPLICAS) if replicated else (*OPTIONS, SYNC),
        engine="trainers.engines.fsdp2",
        settings={"reshard_after_forward": reshard_after_forward, "replicated": replicated},
    )


VARIANTS = (
    _make_strategy(
        "fsdp2",
        "parameters, gradients and optimizer state sharded (PyTorch fully_shard; as ZeRO stage 3)",
        reshard_after_forward=True,
        replicated=False,
    ),
    _make_strategy(
        "fsdp2-zero2",
        "as fsdp2, but parameters stay gathered from forward to backward (as ZeRO stage 2)",
        reshard_after_forward=False,
        replicated=False,
    ),
    _make_strategy(
        "fsdp2-hsdp",
        "sharded within a group of ranks, replicated across groups (hybrid sharding)",
        reshard_after_forward=True,
        replicated=True,
    ),
    _make_strategy(
        "fsdp2-hsdp-zero2",
        "as fsdp2-hsdp, but parameters stay gathered from forward to backward",
        reshard_after_forward=False,
        replicated=True,
    ),
)
