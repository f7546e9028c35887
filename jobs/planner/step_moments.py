"""The bytes on a rank at the moments of forward and backward that can be the peak of a step.

Each moment is a dictionary from the category (docs/instruments.md) to its bytes. The weights, the optimizer's state and the
buffers that always exist are not part of it. The tests compare the largest moment with the peak that a rehearsal finds.
"""

from __future__ import annotations

from typing import NamedTuple

from trainers.theory.division import Division

Moment = dict[str, float]


class RankPart(NamedTuple):
    """The numbers of parameters on one of the tensor-parallel ranks."""

    block_count: int
    """The number of blocks."""
    block_parameters: float
    """The parameters of a block, on average."""
    largest_block_parameters: float
    front_parameters: int
    """The parameters before the blocks."""
    back_parameters: int
    """The parameters behind the blocks."""
    tied_parameters: int
    """The parameters that are before and behind the blocks, such as those of an embedding that is also the head. A rank with
    both ends has them once; the first and the last rank of a pipeline have a copy each."""
    blocks_per_segment: int = 1
    """The number of blocks that backward recomputes together, and FSDP reduces together. The first blocks of the model are such
    a segment, the last blocks are not."""

    @property
    def outside_parameters(self) -> int:
        """Outside of blocks."""
        return self.front_parameters + self.back_parameters - self.tied_parameters

    @property
    def parameters(self) -> float:
        """All."""
        return self.block_count * self.block_parameters + self.outside_parameters


class Activations(NamedTuple):
    """The bytes of activations on a rank."""

    kept_bytes: float = 0.0
    """What blocks save, for all micro-batches that the rank keeps when backward begins."""
    pass_bytes: float = 0.0
    """The same for one micro-batch."""
    backward_bytes: float = 0.0
    """What exists in addition when the backward of a block begins: recomputed activations, and gradients of activations."""
    head_bytes: float = 0.0
    """What is saved outside of blocks, for all kept micro-batches."""
    head_left_bytes: float = 0.0
    """The part of `head` that is left when backward reaches the blocks: the logits, and what other micro-batches save."""
    head_weight_bytes: float = 0.0
    """The gradients of 16-bit copies of weights outside of blocks, with autocast."""
    logit_bytes: float = 0.0
    """The gradients of the logits, which forward computes, for all kept micro-batches."""
    pass_logit_bytes: float = 0.0
    """The same for one micro-batch."""
    chunk_bytes: float = 0.0
    """What exists in addition when forward ends: logits that the loss casts to fp32, and 16-bit copies of weights."""


def list_moments(division: Division, rank_part: RankPart, activations: Activations) -> list[Moment]:
    """The bytes of each moment."""
    gradient_bytes = division.gradient_bytes / division.gradient_ranks + division.pass_gradient_bytes
    block_moments = _list_block_moments(division, rank_part, activations, gradient_bytes - division.kept_gradient_bytes)
    return [
        *_list_head_moments(division, rank_part, activations, gradient_bytes),
        *block_moments,
        _describe_last_moment(division, rank_part, activations, gradient_bytes),
    ]


def _count_gathered_bytes(division: Division, rank_part: RankPart, blocks_left: int) -> float:
    """The bytes of gathered or copied weights between the backward of two blocks. blocks_left: the number of blocks whose
    gradients are not yet computed."""
    if division.gathers == "nothing":
        return division.copy_bytes * rank_part.parameters
    gathered_blocks = blocks_left if division.gathers == "everything" else 0
    return division.gathered_bytes * min(
        rank_part.outside_parameters + gathered_blocks * rank_part.block_parameters, division.most_gathered
    )


def _list_head_moments(
    division: Division, rank_part: RankPart, activations: Activations, final_gradient_bytes: float
) -> list[Moment]:
    """When forward begins, when the loss is computed, and when backward has computed the gradients behind the blocks."""
    waiting_bytes, kept_gradient = division.waiting_gradient_bytes, division.kept_gradient_bytes
    forward_moment = {
        "gathered": _count_gathered_bytes(division, rank_part, rank_part.block_count),
        "gradient": kept_gradient * rank_part.parameters,
        "activation": activations.kept_bytes + activations.head_bytes,
        "temporary": max(activations.logit_bytes + activations.chunk_bytes, division.gather_buffer_bytes),
    }
    # Weights behind the blocks that are not part of a unit are freed before their gradients are reduced.
    freed_bytes = 0 if division.rest_bytes else division.gathered_bytes
    reduced_bytes = max(division.reduced_bytes - freed_bytes, min(division.reduced_bytes, division.computed_bytes))
    gathered_bytes = division.gathered_bytes * rank_part.largest_block_parameters if division.gathers == "blocks" else 0.0
    # DeepSpeed allocates buckets when it gets the first gradient, for which the gradient of the logits is no longer needed.
    # Stage 1 keeps them from pass to pass.
    bucket_bytes = division.backward_bucket_bytes * division.bucket_elements
    keeps_buckets = kept_gradient > 0 and division.gradient_ranks == 1
    head_moment = {
        **forward_moment,
        "gathered": forward_moment["gathered"] + gathered_bytes,
        "gradient": forward_moment["gradient"]
        + (0.0 if waiting_bytes else max(0.0, final_gradient_bytes - kept_gradient) * rank_part.back_parameters),
        "temporary": (activations.logit_bytes + bucket_bytes if keeps_buckets else max(activations.logit_bytes, bucket_bytes))
        + (waiting_bytes or reduced_bytes) * rank_part.back_parameters,
    }
    if activations.head_weight_bytes:
        # With autocast, the gradients of 16-bit copies are cast when the gradient of the logits is no longer needed.
        head_moment["activation"] = activations.kept_bytes + activations.head_left_bytes
        head_moment["temporary"] += activations.head_weight_bytes - activations.pass_logit_bytes
        forward_moment["temporary"] = activations.logit_bytes + max(activations.chunk_bytes, activations.head_weight_bytes)
    if not division.previous_unit_bytes:
        return [forward_moment, head_moment]
    # FSDP2 frees the buffer of a gather only when the next gather ends. So when forward begins, there are two.
    gathered_bytes = division.gathered_bytes * (rank_part.outside_parameters + rank_part.largest_block_parameters)
    begin_moment = {
        "gathered": gathered_bytes,
        "gradient": forward_moment["gradient"],
        "activation": 0.0,
        "temporary": gathered_bytes,
    }
    return [begin_moment, forward_moment, head_moment]


def _list_block_moments(division: Division, rank_part: RankPart, activations: Activations, growth_bytes: float) -> list[Moment]:
    """The begin and the end of the backward of the first, the second and the last block that backward reaches. growth_bytes:
    the bytes per parameter by which the gradients grow in backward."""
    last_index = rank_part.block_count - 1
    done_block_counts = sorted({0, min(1, last_index), last_index}) if rank_part.block_count else []
    return [
        _describe_block_moment(division, rank_part, activations, growth_bytes, done_blocks, computed_blocks)
        for done_blocks in done_block_counts
        for computed_blocks in (0, 1)
    ]


def _describe_block_moment(
    division: Division,
    rank_part: RankPart,
    activations: Activations,
    growth_bytes: float,
    done_blocks: int,
    computed_blocks: int,
) -> Moment:
    """The bytes in the backward of a block, or of the segment that contains the first block of the model. done_blocks: the
    number of blocks whose backward is over. computed_blocks: 0 when the backward of the block begins, 1 when it has computed
    all gradients."""
    waiting_bytes = division.waiting_gradient_bytes
    has_units = division.rest_bytes > 0
    bucket_elements = division.bucket_elements
    unit_blocks = rank_part.blocks_per_segment if done_blocks == rank_part.block_count - 1 else 1
    gradient_elements = (done_blocks + computed_blocks) * rank_part.block_parameters
    if unit_blocks > 1:
        gradient_elements = (
            rank_part.block_count - (unit_blocks if has_units or not computed_blocks else 0)
        ) * rank_part.block_parameters
    gathered_blocks = (2 if done_blocks < rank_part.block_count - 1 else unit_blocks) if division.gathers == "blocks" else 0
    # the share of `pass_bytes` that is free
    freed_share = 0.0 if unit_blocks > 1 and not computed_blocks else (done_blocks + computed_blocks) / rank_part.block_count
    bucket_bytes = division.backward_bucket_bytes
    if rank_part.back_parameters + gradient_elements >= bucket_elements:
        bucket_bytes += division.bucket_copy_bytes
    gathered_bytes = _count_gathered_bytes(division, rank_part, max(unit_blocks, rank_part.block_count - done_blocks))
    grown_elements = (0.0 if waiting_bytes else rank_part.back_parameters) + (
        0.0 if waiting_bytes and not has_units else gradient_elements
    )
    temporary_bytes = (
        activations.logit_bytes
        - activations.pass_logit_bytes
        + waiting_bytes * (rank_part.back_parameters + (0.0 if has_units else gradient_elements))
    )
    temporary_bytes += (
        division.unit_bytes * unit_blocks * rank_part.largest_block_parameters
        if computed_blocks
        else activations.backward_bytes
    )
    temporary_bytes += bucket_bytes * bucket_elements + (
        division.previous_unit_bytes * rank_part.largest_block_parameters if done_blocks else 0.0
    )
    if has_units and not division.previous_unit_bytes and growth_bytes < 0 and unit_blocks == 1:
        # FSDP1 frees the sum of earlier passes of a unit when it has reduced the unit
        grown_elements -= computed_blocks * rank_part.block_parameters
    return {
        "gathered": gathered_bytes + division.gathered_bytes * gathered_blocks * rank_part.largest_block_parameters,
        "gradient": division.kept_gradient_bytes * rank_part.parameters + growth_bytes * grown_elements,
        "activation": activations.kept_bytes - activations.pass_bytes * freed_share + activations.head_left_bytes,
        "temporary": temporary_bytes,
    }


def _describe_last_moment(
    division: Division, rank_part: RankPart, activations: Activations, final_gradient_bytes: float
) -> Moment:
    """When backward has computed the last gradients, those before the blocks."""
    waiting_bytes, computed_bytes = division.waiting_gradient_bytes, division.computed_bytes
    gradient_bytes = final_gradient_bytes * (
        rank_part.parameters - (rank_part.outside_parameters if division.rest_bytes else 0)
    )
    if division.rest_bytes:
        temporary_bytes = division.rest_bytes * rank_part.outside_parameters
        if rank_part.tied_parameters:
            # A tied weight gets two gradients, which exist together with their sum, while those of a block are being reduced.
            tied_bytes = division.gathered_bytes + 3 * waiting_bytes + division.kept_gradient_bytes
            temporary_bytes = max(
                temporary_bytes,
                tied_bytes * rank_part.outside_parameters + division.previous_unit_bytes * rank_part.largest_block_parameters,
            )
    else:
        temporary_bytes = max(
            division.reduced_bytes * rank_part.front_parameters, division.bucket_copy_bytes * division.bucket_elements
        )
        temporary_bytes += division.backward_bucket_bytes * division.bucket_elements
        if waiting_bytes:
            temporary_bytes += waiting_bytes * rank_part.parameters if division.kept_gradient_bytes else 0.0
        else:
            temporary_bytes += (
                max(0, 3 * computed_bytes - max(computed_bytes, division.reduced_bytes)) * rank_part.tied_parameters
            )
        # DDP adds a gradient to the sum of earlier passes before it copies the sum to a bucket and frees it.
        temporary_bytes += max(0.0, division.kept_gradient_bytes - final_gradient_bytes) * (
            rank_part.parameters if waiting_bytes else rank_part.front_parameters
        )
        temporary_bytes = max(temporary_bytes, division.reduction_bytes * rank_part.parameters)
    return {
        "gathered": _count_gathered_bytes(division, rank_part, 0) if not division.rest_bytes else 0.0,
        "gradient": gradient_bytes,
        "activation": activations.kept_bytes - activations.pass_bytes + activations.head_left_bytes,
        "temporary": temporary_bytes + activations.logit_bytes - activations.pass_logit_bytes,
    }
