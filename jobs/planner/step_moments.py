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

    blocks: int
    """The number of blocks."""
    block: float
    """The parameters of a block, on average."""
    largest_block: float
    front: int
    """The parameters before the blocks."""
    back: int
    """The parameters behind the blocks."""
    tied: int
    """The parameters that are before and behind the blocks, such as those of an embedding that is also the head. A rank with
    both ends has them once; the first and the last rank of a pipeline have a copy each."""
    segment: int = 1
    """The number of blocks that backward recomputes together, and FSDP reduces together. The first blocks of the model are such
    a segment, the last blocks are not."""

    @property
    def outside(self) -> int:
        """Outside of blocks."""
        return self.front + self.back - self.tied

    @property
    def parameters(self) -> float:
        """All."""
        return self.blocks * self.block + self.outside


class Activations(NamedTuple):
    """The bytes of activations on a rank."""

    kept_bytes: float = 0.0
    """What blocks save, for all micro-batches that the rank keeps when backward begins."""
    of_pass: float = 0.0
    """The same for one micro-batch."""
    in_backward: float = 0.0
    """What exists in addition when the backward of a block begins: recomputed activations, and gradients of activations."""
    head: float = 0.0
    """What is saved outside of blocks, for all kept micro-batches."""
    head_left: float = 0.0
    """The part of `head` that is left when backward reaches the blocks: the logits, and what other micro-batches save."""
    head_weights: float = 0.0
    """The gradients of 16-bit copies of weights outside of blocks, with autocast."""
    logits: float = 0.0
    """The gradients of the logits, which forward computes, for all kept micro-batches."""
    logits_of_pass: float = 0.0
    """The same for one micro-batch."""
    chunk: float = 0.0
    """What exists in addition when forward ends: logits that the loss casts to fp32, and 16-bit copies of weights."""


def list_moments(division: Division, part: RankPart, activations: Activations) -> list[Moment]:
    """The bytes of each moment."""
    final = division.gradient_bytes / division.gradient_ranks + division.pass_gradient_bytes
    blocks = _list_block_moments(division, part, activations, final - division.kept_gradient_bytes)
    return [*_list_head_moments(division, part, activations, final), *blocks, _last_moment(division, part, activations, final)]


def _gathered_bytes(division: Division, part: RankPart, blocks_left: int) -> float:
    """The bytes of gathered or copied weights between the backward of two blocks. blocks_left: the number of blocks whose
    gradients are not yet computed."""
    if division.gathers == "nothing":
        return division.copy_bytes * part.parameters
    blocks = blocks_left if division.gathers == "everything" else 0
    return division.gathered_bytes * min(part.outside + blocks * part.block, division.most_gathered)


def _list_head_moments(division: Division, part: RankPart, activations: Activations, final: float) -> list[Moment]:
    """When forward begins, when the loss is computed, and when backward has computed the gradients behind the blocks."""
    waiting, kept_gradient = division.waiting_gradient_bytes, division.kept_gradient_bytes
    forward = {
        "gathered": _gathered_bytes(division, part, part.blocks),
        "gradient": kept_gradient * part.parameters,
        "activation": activations.kept_bytes + activations.head,
        "temporary": max(activations.logits + activations.chunk, division.gather_buffer_bytes),
    }
    # Weights behind the blocks that are not part of a unit are freed before their gradients are reduced.
    freed = 0 if division.rest_bytes else division.gathered_bytes
    reduced_bytes = max(division.reduced_bytes - freed, min(division.reduced_bytes, division.computed_bytes))
    gathered = division.gathered_bytes * part.largest_block if division.gathers == "blocks" else 0.0
    # DeepSpeed allocates buckets when it gets the first gradient, for which the gradient of the logits is no longer needed.
    # Stage 1 keeps them from pass to pass.
    buckets = division.backward_bucket_bytes * division.bucket_elements
    keeps_buckets = kept_gradient > 0 and division.gradient_ranks == 1
    head = {
        **forward,
        "gathered": forward["gathered"] + gathered,
        "gradient": forward["gradient"] + (0.0 if waiting else max(0.0, final - kept_gradient) * part.back),
        "temporary": (activations.logits + buckets if keeps_buckets else max(activations.logits, buckets))
        + (waiting or reduced_bytes) * part.back,
    }
    if activations.head_weights:
        # With autocast, the gradients of 16-bit copies are cast when the gradient of the logits is no longer needed.
        head["activation"] = activations.kept_bytes + activations.head_left
        head["temporary"] += activations.head_weights - activations.logits_of_pass
        forward["temporary"] = activations.logits + max(activations.chunk, activations.head_weights)
    if not division.previous_unit_bytes:
        return [forward, head]
    # FSDP2 frees the buffer of a gather only when the next gather ends. So when forward begins, there are two.
    gathered = division.gathered_bytes * (part.outside + part.largest_block)
    begin = {"gathered": gathered, "gradient": forward["gradient"], "activation": 0.0, "temporary": gathered}
    return [begin, forward, head]


def _list_block_moments(division: Division, part: RankPart, activations: Activations, growth: float) -> list[Moment]:
    """The begin and the end of the backward of the first, the second and the last block that backward reaches. growth: the
    bytes per parameter by which the gradients grow in backward."""
    last = part.blocks - 1
    numbers = sorted({0, min(1, last), last}) if part.blocks else []
    return [_block_moment(division, part, activations, growth, done, computed) for done in numbers for computed in (0, 1)]


def _block_moment(
    division: Division, part: RankPart, activations: Activations, growth: float, done: int, computed: int
) -> Moment:
    """The bytes in the backward of a block, or of the segment that contains the first block of the model. done: the number of
    blocks whose backward is over. computed: 0 when the backward of the block begins, 1 when it has computed all gradients."""
    waiting, has_units, buckets = division.waiting_gradient_bytes, division.rest_bytes > 0, division.bucket_elements
    blocks = part.segment if done == part.blocks - 1 else 1
    elements = (done + computed) * part.block
    if blocks > 1:
        elements = (part.blocks - (blocks if has_units or not computed else 0)) * part.block
    gathered_blocks = (2 if done < part.blocks - 1 else blocks) if division.gathers == "blocks" else 0
    freed_share = 0.0 if blocks > 1 and not computed else (done + computed) / part.blocks  # the share of `of_pass` that is free
    bucket_bytes = division.backward_bucket_bytes
    if part.back + elements >= buckets:
        bucket_bytes += division.bucket_copy_bytes
    gathered = _gathered_bytes(division, part, max(blocks, part.blocks - done))
    gradients = (0.0 if waiting else part.back) + (0.0 if waiting and not has_units else elements)
    temporary = activations.logits - activations.logits_of_pass + waiting * (part.back + (0.0 if has_units else elements))
    temporary += division.unit_bytes * blocks * part.largest_block if computed else activations.in_backward
    temporary += bucket_bytes * buckets + (division.previous_unit_bytes * part.largest_block if done else 0.0)
    if has_units and not division.previous_unit_bytes and growth < 0 and blocks == 1:
        gradients -= computed * part.block  # FSDP1 frees the sum of earlier passes of a unit when it has reduced the unit
    return {
        "gathered": gathered + division.gathered_bytes * gathered_blocks * part.largest_block,
        "gradient": division.kept_gradient_bytes * part.parameters + growth * gradients,
        "activation": activations.kept_bytes - activations.of_pass * freed_share + activations.head_left,
        "temporary": temporary,
    }


def _last_moment(division: Division, part: RankPart, activations: Activations, final: float) -> Moment:
    """When backward has computed the last gradients, those before the blocks."""
    waiting, computed = division.waiting_gradient_bytes, division.computed_bytes
    gradient = final * (part.parameters - (part.outside if division.rest_bytes else 0))
    if division.rest_bytes:
        temporary = division.rest_bytes * part.outside
        if part.tied:
            # A tied weight gets two gradients, which exist together with their sum, while those of a block are being reduced.
            tied_bytes = division.gathered_bytes + 3 * waiting + division.kept_gradient_bytes
            temporary = max(temporary, tied_bytes * part.outside + division.previous_unit_bytes * part.largest_block)
    else:
        temporary = max(division.reduced_bytes * part.front, division.bucket_copy_bytes * division.bucket_elements)
        temporary += division.backward_bucket_bytes * division.bucket_elements
        if waiting:
            temporary += waiting * part.parameters if division.kept_gradient_bytes else 0.0
        else:
            temporary += max(0, 3 * computed - max(computed, division.reduced_bytes)) * part.tied
        # DDP adds a gradient to the sum of earlier passes before it copies the sum to a bucket and frees it.
        temporary += max(0.0, division.kept_gradient_bytes - final) * (part.parameters if waiting else part.front)
        temporary = max(temporary, division.reduction_bytes * part.parameters)
    return {
        "gathered": _gathered_bytes(division, part, 0) if not division.rest_bytes else 0.0,
        "gradient": gradient,
        "activation": activations.kept_bytes - activations.of_pass + activations.head_left,
        "temporary": temporary + activations.logits - activations.logits_of_pass,
    }
