"""How a strategy divides a model over its ranks: what each rank holds of parameters, gradients and optimizer state.

The numbers describe the engines of this project (docs/strategies.md) more exactly than textbooks do: for example, FSDP adds up
whole gradients if a step has several passes (by default), and DeepSpeed keeps a second copy of the weights.
"""

from __future__ import annotations

import math
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
    """Bytes of the gradients at the end of backward."""
    gradient_ranks: int = 1
    computed_bytes: int = 4
    """Bytes per element of a gradient when backward computes it."""
    kept_gradient_bytes: float = 0.0
    """Bytes of the gradients that are in memory when the last backward of a step begins, because they stay allocated between
    steps or come from earlier passes. They are those of this rank, so no `gradient_ranks` divides them."""
    pass_gradient_bytes: float = 0.0
    """Bytes of reduced gradients of the last pass that stay beside `kept_gradient_bytes` until its backward ends."""
    waiting_gradient_bytes: int = 0
    """Bytes of the gradients of a pass that wait beside `kept_gradient_bytes` until backward has computed all of them: of all
    parameters, or, if `rest_bytes` is not 0, of those outside of blocks."""
    reduced_bytes: float = 0.0
    """Bytes per element of a tensor while its gradient is computed, cast and reduced, beside the bytes of other fields."""
    unit_bytes: int = 0
    """The same for a block whose gradients are reduced together."""
    previous_unit_bytes: int = 0
    """Bytes per parameter of a block whose gradients are still being reduced while those of the next block are computed."""
    rest_bytes: float = 0.0
    """As `unit_bytes`, for all parameters outside of blocks, if they are reduced together at the end of backward; with their
    gathered weights."""
    reduction_bytes: float = 0.0
    """Bytes of buffers, per parameter of the rank, if all gradients are reduced together at the end of backward."""
    master_bytes: int = 0
    """Bytes of the optimizer's own copy of the weights."""
    optimizer_ranks: int = 1
    """The number of ranks over which the optimizer state and the optimizer's copy of the weights are sharded; 0: they are not
    on the GPU."""
    copy_bytes: int = 0
    """Bytes of a copy of all weights in the precision of the computation."""
    gathers: Gathers = "nothing"
    """nothing: a rank gathers no weights. blocks: a rank gathers the weights of a block before it uses them, and then frees
    them. everything: the gathered weights of all blocks stay in memory together, until backward has used them."""
    gathered_bytes: int = 0
    most_gathered: float = math.inf
    """The largest number of parameters that are gathered at a time."""
    gather_buffer_bytes: float = 0.0
    """Bytes of the buffer of a gather, in total, from which parameters are copied when they are used."""
    buffer_bytes: float = 0.0
    """Bytes of buffers of collectives that stay allocated, per parameter of the rank's part of the model."""
    norm_bytes: int = 0
    """Bytes per element of the largest tensor that the optimizer has, for the norm of the gradients."""
    bucket_elements: float = 0.0
    """Elements of a bucket of gradients, which is reduced as one tensor."""
    bucket_bytes: int = 0
    """Bytes per element of a bucket that stay allocated."""
    bucket_copy_bytes: int = 0
    """Bytes per element of copies of a bucket while it is reduced."""
    backward_bucket_bytes: int = 0
    """Bytes per element of a bucket that are allocated only during backward."""


def divide_by_cuts(cell: Cell, cuts: Collection[str] = ()) -> Division:
    """The division of a strategy of which only is known what it shards. cuts: as `Strategy.cuts`; empty: each rank holds the
    whole of its part of the model."""
    element_bytes, rank_count = precision.weight_bytes(cell.precision), cell.shards
    copy_bytes = precision.computed_bytes(cell.precision) if cell.precision in precision.CAST else 0
    weight_ranks, gradient_ranks, optimizer_ranks = (
        rank_count if part in cuts else 1 for part in ("parameter", "gradient", "optimizer_state")
    )
    accumulates = cell.gradient_accumulation_steps > 1
    division = Division(
        element_bytes,
        weight_ranks,
        element_bytes,
        gradient_ranks,
        computed_bytes=copy_bytes or element_bytes,
        kept_gradient_bytes=element_bytes if accumulates else 0,
        # Backward casts the 16-bit gradients to the type of the weights when it has computed all of them.
        waiting_gradient_bytes=copy_bytes,
        reduced_bytes=element_bytes if accumulates else copy_bytes,
        optimizer_ranks=optimizer_ranks,
        copy_bytes=copy_bytes,
    )
    if weight_ranks == 1:
        return division
    return msgspec.structs.replace(division, copy_bytes=0, gathers="blocks", gathered_bytes=copy_bytes or element_bytes)
