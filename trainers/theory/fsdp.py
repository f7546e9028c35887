"""The theory of sharding by PyTorch's FSDP1 and FSDP2 (`fully_shard`); docs/strategies.md says what is gathered when."""

from __future__ import annotations

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import EVERY_PASS, LAST_PASS
from trainers.model.precision import computed_bytes, weight_bytes
from trainers.strategy_options import Fsdp1Options
from trainers.theory.division import Division
from trainers.theory.term import ModelPart, Term, Window, list_overflow_terms

RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # the shardings that free parameters after forward, so backward gathers them again


def count_reductions(cell: Cell) -> tuple[int, int]:
    """How often a step exchanges each gradient: (among the ranks that shard one copy of the model, among replicas)."""
    passes = cell.gradient_accumulation_steps
    return 1 if cell.sync == LAST_PASS else passes, passes if cell.sync == EVERY_PASS else 1


def divide_fsdp1(cell: Cell, parameter_count: int, *, sharding: str) -> Division:
    """What a rank of FSDP1 holds. Gradients of a unit exist twice before they are reduced, one by one and as a flat tensor. If
    passes do not reduce gradients, the flat tensor is their sum. sharding: a name of FSDP's `ShardingStrategy`."""
    computed_size, weight_size = computed_bytes(cell.precision), weight_bytes(cell.precision)
    passes = cell.gradient_accumulation_steps
    division = divide_sharded(cell, parameter_count, reshards=sharding in RESHARDING)
    if sharding == "NO_SHARD":
        gathers, gathered_size = ("blocks", computed_size) if computed_size < weight_size else ("nothing", 0)
        division = msgspec.structs.replace(
            division, weight_ranks=1, gradient_ranks=1, optimizer_ranks=1, gathers=gathers, gathered_bytes=gathered_size
        )
    summed_size = computed_size if count_reductions(cell)[0] < passes else division.gradient_bytes / division.gradient_ranks
    kept_bytes = summed_size if passes > 1 else 0.0
    cast_bytes = computed_size + weight_size * (1 + 1 / division.gradient_ranks) if computed_size < weight_size else 0.0
    return msgspec.structs.replace(
        division,
        kept_gradient_bytes=kept_bytes,
        unit_bytes=2 * computed_size,
        previous_unit_bytes=0,
        rest_bytes=max(2 * computed_size + division.gathered_bytes, cast_bytes) + kept_bytes,
        pass_gradient_bytes=0.0,
    )


def divide_sharded(cell: Cell, parameter_count: int, *, reshards: bool) -> Division:
    """What a rank holds of a sharded model. The gradients of a unit are computed while the buffer with the gradients of the
    unit before it, in the type of the weights, is reduced. reshards: whether blocks are freed after forward."""
    weight_size, computed_size, shard_count = weight_bytes(cell.precision), computed_bytes(cell.precision), cell.shards
    is_on_gpu, passes = Fsdp1Options(cell.options).offload != "cpu", cell.gradient_accumulation_steps
    (reductions, replica_reductions), shard_size = count_reductions(cell), weight_size / shard_count if is_on_gpu else 0.0
    kept_bytes, rest_size = 0.0, float(computed_size + weight_size)
    if reductions > 1:
        kept_bytes, rest_size = shard_size, rest_size + shard_size
    elif passes > 1:  # a pass adds whole gradients to those of earlier passes
        kept_bytes, rest_size = weight_size, max(weight_size + 2 * computed_size, 2 * weight_size)
    return Division(
        weight_size if is_on_gpu else 0,
        shard_count,
        weight_size if is_on_gpu else 0,
        shard_count,
        computed_bytes=computed_size,
        kept_gradient_bytes=kept_bytes,
        # `fully_shard` keeps what a pass all-reduces among replicas until the pass ends, beside the sum of earlier passes.
        pass_gradient_bytes=shard_size if shard_count < cell.dp and 1 < passes == replica_reductions else 0.0,
        waiting_gradient_bytes=computed_size,
        unit_bytes=computed_size,
        previous_unit_bytes=weight_size,
        rest_bytes=rest_size,
        optimizer_ranks=shard_count if is_on_gpu else 0,
        gathers="blocks" if reshards and Fsdp1Options(cell.options).wrap != "none" else "everything",
        gathered_bytes=computed_size,
    )


def list_fsdp1_terms(cell: Cell, model_part: ModelPart, *, sharding: str) -> list[Term]:
    """What a rank of FSDP1 sends in a step. sharding: a name of FSDP's `ShardingStrategy`."""
    reductions, _ = count_reductions(cell)
    if sharding == "NO_SHARD":
        gradient_bytes = model_part.elements * weight_bytes(cell.precision)
        return [_make_reduction_term("gradients", "all_reduce", gradient_bytes, cell.dp, model_part.blocks + 1, reductions)]
    if Fsdp1Options(cell.options).wrap == "none":  # the whole model is one unit
        model_part = msgspec.structs.replace(model_part, blocks=0, block_elements=0.0)
    # Parameters that are not freed after forward stay gathered until gradients are reduced.
    passes, block_gathers = (cell.gradient_accumulation_steps, 2) if sharding in RESHARDING else (reductions, 1)
    terms = list_sharding_terms(cell, model_part, block_gathers=block_gathers * passes, other_gathers=passes)
    return [*terms, *list_overflow_terms(cell.precision, cell.shards)]


def list_fsdp2_terms(cell: Cell, model_part: ModelPart, *, reshards: bool) -> list[Term]:
    """What a rank of FSDP2 sends in a step. reshards: as in `divide_sharded`."""
    passes = cell.gradient_accumulation_steps
    terms = list_sharding_terms(cell, model_part, block_gathers=(2 if reshards else 1) * passes, other_gathers=passes)
    return [*terms, *list_overflow_terms(cell.precision, cell.shards)]


def list_sharding_terms(cell: Cell, model_part: ModelPart, *, block_gathers: int, other_gathers: int) -> list[Term]:
    """The communication of sharding in a step. block_gathers, other_gathers: how often a step gathers the parameters inside and
    outside of blocks."""
    weight_size, shards, unit_count = weight_bytes(cell.precision), cell.shards, model_part.blocks + 1
    gathered = model_part.block_elements * block_gathers + (model_part.elements - model_part.block_elements) * other_gathers
    gather_calls, gradient_bytes = model_part.blocks * block_gathers + other_gathers, model_part.elements * weight_size
    reductions, replica_reductions = count_reductions(cell)
    terms = [
        Term("parameters, each time they are gathered", "all_gather", computed_bytes(cell.precision) * gathered, shards,
             calls=gather_calls, hides_in="step"),
        _make_reduction_term("gradients", "reduce_scatter", gradient_bytes, shards, unit_count, reductions),
    ]  # fmt: skip
    if (replicas := cell.dp // shards) > 1:
        name = "gradients' shards among replicas"
        term = _make_reduction_term(name, "all_reduce", gradient_bytes / shards, replicas, unit_count, replica_reductions)
        terms.append(msgspec.structs.replace(term, axis="replicas"))
    return terms


def _make_reduction_term(name: str, op: str, sent_bytes: float, group_size: int, calls: int, reductions: int) -> Term:
    """The exchange of gradients in a step. sent_bytes, calls: bytes and collectives of each of the `reductions`."""
    window: Window = "last_backward" if reductions == 1 else "backward"
    when = "once a step" if reductions == 1 else "each pass"
    return Term(f"{name}, {when}", op, sent_bytes * reductions, group_size, calls=calls * reductions, hides_in=window)
