"""Combinations of tensor parallelism (tp), pipeline parallelism (pp) and sharded data parallelism (dp) on one mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Cell
from shardlab.registry import Option
from trainers.communication import Term
from trainers.parallel import sharded_groups
from trainers.precision import ALL, REASONS, SHARDED, computed_bytes, weight_bytes
from trainers.strategies.pipeline import PipelineEngine, why_not_1f1b, why_not_staged
from trainers.strategies.tensor import SEQUENCE_PARALLEL, TensorEngine, activations, split_layers, why_not_split
from trainers.strategies.tensor import refuse as refuse_split
from trainers.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from trainers.parallel.held import Held
    from trainers.ranks import Ranks
    from trainers.workload import Task

Refuse = Callable[[Cell], str | None]
Build = Callable[[Cell, "Task", "Ranks"], TensorEngine | PipelineEngine]


class ShardedTensorEngine(TensorEngine):
    """Blocks are split over tp; the parameters that a rank then has are sharded over dp."""

    casts_itself = True

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        # Until the last pass gradients stay as they are on every rank: no communication, at the price of their memory.
        cast("FSDPModule", self.model).set_requires_gradient_sync(last)
        return nullcontext()

    def theory(self) -> list[Term]:
        passes = self.cell.gradient_accumulation_steps
        split = activations(self.cell, self.task, self.held)
        return [*split, *shards(self.cell, self.held, block_gathers=2 * passes, other_gathers=passes), *self.agreeing()]

    def effective(self) -> dict[str, Any]:
        return {**super().effective(), **sharded_groups.effective(self.held.module, self.held.blocks)}


class MeshPipelineEngine(PipelineEngine):
    """A pipeline whose blocks may be split over tp and sharded over dp."""

    def theory(self) -> list[Term]:
        found, degrees = super().theory(), _degrees(self.cell)
        if "tp" in degrees:
            found += activations(self.cell, self.task, self.held)
        if "dp" in degrees:
            # Gathered by a step's first micro-batch and kept to its last: to gather for each would cost more than it frees.
            found += shards(self.cell, self.held, block_gathers=1, other_gathers=1)
        return found

    def effective(self) -> dict[str, Any]:
        found, degrees = super().effective(), _degrees(self.cell)
        if "tp" in degrees:
            found["split_layers"] = split_layers(self.held)
        return {**found, **sharded_groups.effective(self.held.module, self.held.blocks)} if "dp" in degrees else found


def shards(cell: Cell, held: Held, *, block_gathers: int, other_gathers: int) -> list[Term]:
    """What fully_shard exchanges over the dp ranks in a step."""
    inside, outside = held.padded[True], held.padded[False]
    itemsize, reduced, n = computed_bytes(cell.precision), float(weight_bytes(cell.precision)), held.mesh["dp"].size()
    return [
        Term("blocks' parameters, gathered over dp", "all_gather", inside * itemsize, n, block_gathers),
        Term("other parameters, gathered over dp", "all_gather", outside * itemsize, n, other_gathers),
        Term("gradients over dp, once a step", "reduce_scatter", (inside + outside) * reduced, n),
    ]


def _degrees(cell: Cell) -> tuple[str, ...]:
    return next(variant.degrees for variant in VARIANTS if variant.name == cell.strategy)


def build_sharded_tensor(cell: Cell, task: Task, ranks: Ranks) -> ShardedTensorEngine:
    from trainers.parallel.held import Held

    sequence = bool(cell.options["sequence_parallel"])
    held = Held(cell, task, ranks, split=True, sequence=sequence, reshard_after_forward=True)
    return ShardedTensorEngine(cell, task, ranks, held)


def build_pipeline(cell: Cell, task: Task, ranks: Ranks) -> MeshPipelineEngine:
    from trainers.parallel.held import Held
    from trainers.parallel.schedule import Pipeline

    sharded = "dp" in _degrees(cell)
    reshard_after_forward = False if sharded else None
    held = Held(cell, task, ranks, stages=cell.pp, split="tp" in _degrees(cell), reshard_after_forward=reshard_after_forward)
    pipeline = Pipeline(cell, task, held, ranks.device, "1f1b", sharded=sharded)
    return MeshPipelineEngine(cell, task, ranks, held, pipeline)


def refuse_pipeline(cell: Cell) -> str | None:
    return why_not_staged(cell) or why_not_1f1b(cell)


def refuse_split_pipeline(cell: Cell) -> str | None:
    return why_not_split(cell) or refuse_pipeline(cell)


def _variant(name: str, degrees: tuple[str, ...], summary: str, refuse: Refuse, build: Build, *options: Option) -> Strategy:
    return Strategy(
        name=name,
        summary=summary,
        precisions=SHARDED if "dp" in degrees else ALL,
        reasons=REASONS if "dp" in degrees else {},
        refuse=refuse,
        build=build,
        degrees=degrees,
        switches=("activation_checkpointing", "max_grad_norm"),
        options=options,
    )


VARIANTS = (
    _variant(
        "tp-fsdp2",
        ("dp", "tp"),
        "each block's linear layers split over tp, all parameters of a rank sharded over dp (FSDP2)",
        refuse_split,
        build_sharded_tensor,
        SEQUENCE_PARALLEL,
    ),
    _variant(
        "tp-pp",
        ("tp", "pp"),
        "1F1B pipeline over pp, each block's linear layers split over tp",
        refuse_split_pipeline,
        build_pipeline,
    ),
    _variant("pp-fsdp2", ("dp", "pp"), "1F1B pipeline over pp, each stage sharded over dp", refuse_pipeline, build_pipeline),
    _variant(
        "tp-pp-fsdp2",
        ("dp", "tp", "pp"),
        "1F1B pipeline over pp, linear layers split over tp, all parameters of a rank sharded over dp (FSDP2)",
        refuse_split_pipeline,
        build_pipeline,
    ),
)
