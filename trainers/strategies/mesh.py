"""Combinations of tensor parallelism (tp), pipeline parallelism (pp) and sharded data parallelism (dp) on one mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import LAST_PASS
from shardlab.registry import Option
from trainers.model.precision import ALL, REASONS, SHARDED
from trainers.strategies.fsdp2 import SYNC
from trainers.strategies.pipeline import refuse_1f1b_schedule, refuse_stages
from trainers.strategies.tensor import refuse as refuse_split
from trainers.strategies.tensor import refuse_tensor_split
from trainers.strategy import Strategy
from trainers.strategy_options import TensorOptions
from trainers.theory.fsdp import divide_sharded
from trainers.theory.mesh import list_mesh_terms

Refuse = Callable[[Cell], str | None]


def refuse_pipeline(cell: Cell) -> str | None:
    if cell.sync != LAST_PASS:
        return f"sync: found {cell.sync}, but torch's pipelines reduce gradients after the last pass. Allowed: {LAST_PASS}."
    return refuse_stages(cell) or refuse_1f1b_schedule(cell)


def refuse_split_pipeline(cell: Cell) -> str | None:
    return refuse_tensor_split(cell) or refuse_pipeline(cell)


def _make_strategy(name: str, degrees: tuple[str, ...], summary: str, refuse: Refuse, *options: Option) -> Strategy:
    return Strategy(
        name=name,
        summary=summary,
        precisions=SHARDED if "dp" in degrees else ALL,
        reasons=REASONS if "dp" in degrees else {},
        refuse=refuse,
        engine="trainers.engines.mesh",
        degrees=degrees,
        switches=("activation_checkpointing", "max_grad_norm"),
        # A pipeline keeps weights until its last micro-batch.
        theory_of_memory=partial(divide_sharded, reshards="pp" not in degrees) if "dp" in degrees else None,
        theory_of_communication=partial(list_mesh_terms, pipelined="pp" in degrees),
        options=options,
    )


VARIANTS = (
    _make_strategy(
        "tp-fsdp2",
        ("dp", "tp"),
        "each block's linear layers split over tp, all parameters of a rank sharded over dp (FSDP2)",
        refuse_split,
        *TensorOptions.list_options(),
        SYNC,
    ),
    _make_strategy(
        "tp-pp", ("tp", "pp"), "1F1B pipeline over pp, each block's linear layers split over tp", refuse_split_pipeline
    ),
    _make_strategy("pp-fsdp2", ("dp", "pp"), "1F1B pipeline over pp, each stage sharded over dp", refuse_pipeline, SYNC),
    _make_strategy(
        "tp-pp-fsdp2",
        ("dp", "tp", "pp"),
        "1F1B pipeline over pp, linear layers split over tp, all parameters of a rank sharded over dp (FSDP2)",
        refuse_split_pipeline,
        SYNC,
    ),
)
