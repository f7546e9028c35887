"""The theory of sharding by PyTorch's FSDP1 and FSDP2 (`fully_shard`); docs/strategies.md says what is gathered when."""

from __future__ import annotations

import msgspec

from shardlab.matrix.cell import Cell
from trainers.model.precision import computed_bytes, weight_bytes
from trainers.theory.division import Division
from trainers.theory.term import ModelPart, Term, list_overflow_terms

RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # the shardings that free parameters after forward, so backward gathers them again


def divide_fsdp1(cell: Cell, parameters: int, *, sharding: str) -> Division:
    """What a rank of FSDP1 holds. Gradients of a unit exist twice before they are reduced, one by one and as a flat tensor; the
    flat tensor is the sum over passes. sharding: a name of FSDP's `ShardingStrategy`."""
    computed, weight = computed_bytes(cell.precision), weight_bytes(cell.precision)
    division = divide_sharded(cell, parameters, reshards=sharding in RESHARDING)
    if sharding == "NO_SHARD":
        gathers, gathered = ("blocks", computed) if computed < weight else ("nothing", 0)
        division = msgspec.structs.replace(
            division, weight_ranks=1, gradient_ranks=1, optimizer_ranks=1, gathers=gathers, gathered_bytes=gathered
        )
    summed = computed if division.kept_gradient_bytes else 0
    cast_bytes = computed + weight * (1 + 1 / division.gradient_ranks) if computed < weight else 0.0
    return msgspec.structs.replace(
        division,
        kept_gradient_bytes=summed,
        unit_bytes=2 * computed,
        previous_unit_bytes=0,
        rest_bytes=max(2 * computed + division.gathered_bytes, cast_bytes) + summed,
    )


def divide_sharded(cell: Cell, parameters: int, *, reshards: bool) -> Division:
    """What a rank holds of a sharded model. The gradients of a unit are computed while the buffer with the gradients of the
    unit before it, in the type of the weights, is reduced. reshards: whether blocks are freed after forward."""
    weight, computed, ranks = weight_bytes(cell.precision), computed_bytes(cell.precision), cell.shards
    on_gpu, kept = cell.options.get("offload") != "cpu", weight if cell.gradient_accumulation_steps > 1 else 0
    return Division(
        weight if on_gpu else 0,
        ranks,
        weight if on_gpu else 0,
        ranks,
        computed_bytes=computed,
        kept_gradient_bytes=kept,
        waiting_gradient_bytes=computed,
        unit_bytes=computed,
        previous_unit_bytes=weight,
        rest_bytes=max(kept + 2 * computed, 2 * weight) if kept else computed + weight,
        optimizer_ranks=ranks if on_gpu else 0,
        gathers="blocks" if reshards and cell.options.get("wrap") != "none" else "everything",
        gathered_bytes=computed,
    )


def list_fsdp1_terms(cell: Cell, part: ModelPart, *, sharding: str) -> list[Term]:
    """What a rank of FSDP1 sends in a step. sharding: a name of FSDP's `ShardingStrategy`."""
    if sharding == "NO_SHARD":
        size = part.elements * weight_bytes(cell.precision)
        return [Term("gradients, once a step", "all_reduce", size, cell.dp, calls=part.blocks + 1, hidden=True)]
    if cell.options.get("wrap") == "none":  # the whole model is one unit
        part = msgspec.structs.replace(part, blocks=0, block_elements=0.0)
    # Parameters that are not freed stay gathered from forward to backward, and until the last pass of a step.
    passes = cell.gradient_accumulation_steps if sharding in RESHARDING else 1
    terms = list_sharding_terms(cell, part, block_gathers=2 * passes if sharding in RESHARDING else 1, other_gathers=passes)
    return [*terms, *list_overflow_terms(cell.precision, cell.shards)]


def list_fsdp2_terms(cell: Cell, part: ModelPart, *, reshards: bool) -> list[Term]:
    """What a rank of FSDP2 sends in a step. reshards: as in `divide_sharded`."""
    passes = cell.gradient_accumulation_steps
    terms = list_sharding_terms(cell, part, block_gathers=(2 if reshards else 1) * passes, other_gathers=passes)
    return [*terms, *list_overflow_terms(cell.precision, cell.shards)]


def list_sharding_terms(cell: Cell, part: ModelPart, *, block_gathers: int, other_gathers: int) -> list[Term]:
    """The communication of sharding in a step. block_gathers, other_gathers: how often a step gathers the parameters inside and
    outside of blocks."""
    weight, shards, units = weight_bytes(cell.precision), cell.shards, part.blocks + 1
    gathered = part.block_elements * block_gathers + (part.elements - part.block_elements) * other_gathers
    gathers, reduced = part.blocks * block_gathers + other_gathers, part.elements * weight
    terms = [
        Term("parameters, each time they are gathered", "all_gather", computed_bytes(cell.precision) * gathered, shards,
             calls=gathers, hidden=True),
        Term("gradients, once a step", "reduce_scatter", reduced, shards, calls=units, hidden=True),
    ]  # fmt: skip
    if (replicas := cell.dp // shards) > 1:
        name = "gradients' shards among replicas, once a step"
        terms.append(Term(name, "all_reduce", reduced / shards, replicas, calls=units, axis="replicas", hidden=True))
    return terms
