"""How a strategy divides a model over its ranks: what each rank holds of parameters, gradients and optimizer state.

The numbers describe the engines of this project (docs/strategies.md) more exactly than textbooks do: for example, FSDP adds up
whole gradients if a step has several passes (by default), and DeepSpeed keeps a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from shardlab.matrix.cell import Cell
from trainers.model import precision

Gathers = Literal["nothing", "blocks", "everything"]


class Division(msgspec.Struct, frozen=True):
    """What a rank holds, before tensor and pipeline parallelism are taken into account (jobs/planner/memory.py does this).

    Fields named ..._bytes are per parameter of the rank's part of the model. Fields named ..._ranks: over how many ranks these
    bytes are sharded.
    """

    weight_bytes: int
    weight_ranks: int = 1
    gradient_bytes: int = 4
    gradient_ranks: int = 1
    whole_gradient_bytes: int = 0
    """Bytes of a second gradient that each rank keeps whole during a step: with FSDP the sum over the passes (unless its
    option sync says otherwise), with DeepSpeed the gradient in 16 bits."""
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


def divide_by_cuts(cell: Cell, cuts: Collection[str] = ()) -> Division:
    """The division of a strategy of which only is known what it shards. cuts: as `Strategy.cuts`; empty: each rank holds the
    whole of its part of the model."""
    weight, ranks = precision.weight_bytes(cell.precision), cell.shards
    copy = precision.computed_bytes(cell.precision) if cell.precision in precision.CAST else 0
    weight_ranks, gradient_ranks, optimizer_ranks = (
        ranks if part in cuts else 1 for part in ("parameter", "gradient", "optimizer_state")
    )
    division = Division(
        weight,
        weight_ranks,
        weight,
        gradient_ranks,
        optimizer_ranks=optimizer_ranks,
        copy_bytes=copy,
        keeps_gradients=cell.gradient_accumulation_steps > 1,
    )
    if weight_ranks == 1:
        return division
    return msgspec.structs.replace(division, copy_bytes=0, gathers="blocks", gathered_bytes=copy or weight)
