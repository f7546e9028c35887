"""The theory of sharding by PyTorch's FSDP1 and FSDP2 (`fully_shard`); docs/strategies.md says what is gathered when."""

from __future__ import annotations

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import EVERY_PASS, LAST_PASS
from trainers.model.precision import computed_bytes, weight_bytes
from trainers.theory.division import Division, divide_by_cuts
from trainers.theory.term import ModelPart, Term, Window, list_overflow_terms

RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # the shardings that free parameters after forward, so backward gathers them again


def count_reductions(cell: Cell) -> tuple[int, int]:
    """How often a step exchanges each gradient: (among the ranks that shard one copy of the model, among replicas)."""
    passes = cell.gradient_accumulation_steps
    return 1 if cell.sync == LAST_PASS else passes, passes if cell.sync == EVERY_PASS else 1


def divide_fsdp1(cell: Cell, parameters: int, *, sharding: str) -> Division:
    """What a rank of FSDP1 holds. It adds up whole gradients in the type of the computation, and casts them when it reduces
    them. sharding: a name of FSDP's `ShardingStrategy`."""
    if sharding == "NO_SHARD":
        return divide_by_cuts(cell)
    division = divide_sharded(cell, parameters, reshards=sharding in RESHARDING)
    whole_bytes = computed_bytes(cell.precision) if division.whole_gradient_bytes else 0
    return msgspec.structs.replace(division, whole_gradient_bytes=whole_bytes, bucket_parameters=0.0)


def divide_sharded(cell: Cell, parameters: int, *, reshards: bool) -> Division:
    """What a rank holds of a sharded model. reshards: whether blocks are freed after forward."""
    weight, ranks, passes = weight_bytes(cell.precision), cell.shards, cell.gradient_accumulation_steps
    on_gpu, sums_whole = cell.options.get("offload") != "cpu", count_reductions(cell)[0] < passes
    return Division(
        weight if on_gpu else 0,
        ranks,
        # The last pass replaces whole gradients by shards, unit by unit, so the shards need no memory beside whole gradients.
        weight if on_gpu and not sums_whole else 0,
        ranks,
        whole_gradient_bytes=weight if sums_whole else 0,
        optimizer_ranks=ranks if on_gpu else 0,
        gathers="blocks" if reshards and cell.options.get("wrap") != "none" else "everything",
        gathered_bytes=computed_bytes(cell.precision),
        keeps_gradients=passes > 1,
        # `fully_shard` keeps what a pass all-reduces among replicas until the pass ends, beside the sum of earlier passes.
        bucket_parameters=weight / ranks if on_gpu and ranks < cell.dp and 1 < passes == count_reductions(cell)[1] else 0.0,
    )


def list_fsdp1_terms(cell: Cell, part: ModelPart, *, sharding: str) -> list[Term]:
    """What a rank of FSDP1 sends in a step. sharding: a name of FSDP's `ShardingStrategy`."""
    reductions, _ = count_reductions(cell)
    if sharding == "NO_SHARD":
        size = part.elements * weight_bytes(cell.precision)
        return [_make_reduction_term("gradients", "all_reduce", size, cell.dp, part.blocks + 1, reductions)]
    if cell.options.get("wrap") == "none":  # the whole model is one unit
        part = msgspec.structs.replace(part, blocks=0, block_elements=0.0)
    # Parameters that are not freed after forward stay gathered until gradients are reduced.
    passes, gathers = (cell.gradient_accumulation_steps, 2) if sharding in RESHARDING else (reductions, 1)
    terms = list_sharding_terms(cell, part, block_gathers=gathers * passes, other_gathers=passes)
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
    reductions, replica_reductions = count_reductions(cell)
    terms = [
        Term("parameters, each time they are gathered", "all_gather", computed_bytes(cell.precision) * gathered, shards,
             calls=gathers, hides_in="step"),
        _make_reduction_term("gradients", "reduce_scatter", reduced, shards, units, reductions),
    ]  # fmt: skip
    if (replicas := cell.dp // shards) > 1:
        name = "gradients' shards among replicas"
        term = _make_reduction_term(name, "all_reduce", reduced / shards, replicas, units, replica_reductions)
        terms.append(msgspec.structs.replace(term, axis="replicas"))
    return terms


def _make_reduction_term(name: str, op: str, size: float, ranks: int, calls: int, reductions: int) -> Term:
    """The exchange of gradients in a step. size, calls: bytes and collectives of each of the `reductions`."""
    window: Window = "last_backward" if reductions == 1 else "backward"
    when = "once a step" if reductions == 1 else "each pass"
    return Term(f"{name}, {when}", op, size * reductions, ranks, calls=calls * reductions, hides_in=window)
