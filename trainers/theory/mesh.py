"""The theory of tensor parallelism (tp), pipelines (pp) and their combinations with sharding (dp) on one mesh."""

from __future__ import annotations

from shardlab.matrix.cell import Cell
from trainers.model.precision import computed_bytes, stream_bytes, weight_bytes
from trainers.strategy_options import TensorOptions
from trainers.theory.fsdp import list_sharding_terms
from trainers.theory.term import SCALAR_BYTES, ModelPart, Term, list_overflow_terms


def list_mesh_terms(cell: Cell, part: ModelPart, *, pipelined: bool) -> list[Term] | None:
    """What a rank of the mesh sends in a step; None if the hidden states or the layers of a block are not known. pipelined:
    whether pp is a dimension of the mesh."""
    if part.hidden_elements is None or (cell.tp > 1 and part.reductions is None):
        return None
    passes = cell.gradient_accumulation_steps
    terms = list_overflow_terms(cell.precision, cell.gpus)
    if cell.max_grad_norm is not None:
        terms.append(Term("the gradient's norm", "all_reduce", SCALAR_BYTES, cell.gpus))
    if cell.tp > 1:
        list_block_terms = _list_sequence_terms if TensorOptions(cell.options).sequence_parallel else _list_split_terms
        terms += list_block_terms(cell, part)
        terms += _list_vocabulary_terms(cell, part)
    if cell.pp > 1:
        terms += _list_pipeline_terms(cell, part)
    if cell.dp > 1:
        # A pipeline gathers parameters for the first micro-batch of a step and keeps them until the last one. To gather them
        # again for each micro-batch would cost more than the freed memory is worth.
        block_gathers, other_gathers = (1, 1) if pipelined else (2 * passes, passes)
        terms += list_sharding_terms(cell, part, block_gathers=block_gathers, other_gathers=other_gathers)
    return terms


def _list_vocabulary_terms(cell: Cell, part: ModelPart) -> list[Term]:
    """The communication of a split embedding, head and loss (Shoeybi et al., Megatron-LM, 2019, section 3)."""
    hidden_bytes, passes = _count_hidden_bytes(cell, part)[1], cell.gradient_accumulation_steps
    exchanges = (
        ("what the split embedding writes", hidden_bytes, part.has_split_embedding),
        ("gradient of what the split head reads", hidden_bytes, part.split_logit_rows > 0),
        ("of each row of logits: the largest, the sum of exponentials, the target's", SCALAR_BYTES * part.split_logit_rows, 3),
    )
    return [
        Term(name, "all_reduce", size * calls * passes, cell.tp, calls=calls * passes, axis="tp")
        for name, size, calls in exchanges
        if size * calls
    ]


def _count_hidden_bytes(cell: Cell, part: ModelPart) -> tuple[float, float]:
    """The bytes of a hidden state: (as a linear layer writes it, as it is between layers). With autocast, a linear layer
    computes in 16 bits but casts its input itself: the input and its gradient are fp32."""
    hidden_elements = part.hidden_elements or 0
    return hidden_elements * computed_bytes(cell.precision), hidden_elements * stream_bytes(cell.precision)


def _list_split_terms(cell: Cell, part: ModelPart) -> list[Term]:
    """The communication of a rank's split blocks in a step, over the tensor-parallel ranks (Shoeybi et al., Megatron-LM, 2019,
    section 3)."""
    (output_bytes, input_bytes), passes = _count_hidden_bytes(cell, part), cell.gradient_accumulation_steps
    forward_reductions, backward_reductions = part.reductions or (0, 0)
    # Recomputation stops when it has all tensors that backward needs. The last all-reduce of a block would come later, so
    # recomputation does not repeat it.
    output_reductions = (forward_reductions * part.blocks + (forward_reductions - 1) * part.recomputed_blocks) * passes
    input_reductions = backward_reductions * part.blocks * passes
    return [
        Term("what row-parallel layers write, such as those of attention and of the MLP", "all_reduce",
             output_bytes * output_reductions, cell.tp, calls=output_reductions, axis="tp"),
        Term("gradients of what column-parallel layers read", "all_reduce", input_bytes * input_reductions, cell.tp,
             calls=input_reductions, axis="tp"),
    ]  # fmt: skip


def _list_sequence_terms(cell: Cell, part: ModelPart) -> list[Term]:
    """As `_list_split_terms`, with sequence parallelism: a reduce-scatter and an all-gather replace each all-reduce. Layers
    that read the same hidden state, such as q, k and v, gather it once."""
    (output_bytes, input_bytes), passes = _count_hidden_bytes(cell, part), cell.gradient_accumulation_steps
    block_passes, recomputed_passes = part.blocks * passes, part.recomputed_blocks * passes
    exchanges = (
        ("what column-parallel layers read", "all_gather", input_bytes, 2 * (block_passes + recomputed_passes)),
        ("its gradient", "reduce_scatter", input_bytes, 2 * block_passes),
        ("what row-parallel layers write", "reduce_scatter", output_bytes, 2 * block_passes + recomputed_passes),
        ("its gradient", "all_gather", output_bytes, 2 * block_passes),
        ("what leaves the blocks, and the gradient of what enters them", "all_gather", input_bytes, 2 * passes),
        ("gradients of the layer norms, once a step", "all_reduce", weight_bytes(cell.precision) * part.partial_elements, 1),
    )
    return [Term(name, op, size * calls, cell.tp, calls=calls, axis="tp") for name, op, size, calls in exchanges if size]


def _list_pipeline_terms(cell: Cell, part: ModelPart) -> list[Term]:
    """The communication of a rank of a pipeline with its neighbours, and with the ranks that have the same weight."""
    message_count = part.messages * cell.gradient_accumulation_steps
    sent_bytes, element_bytes = _count_hidden_bytes(cell, part)[1] * message_count, weight_bytes(cell.precision)
    name = "hidden states to the next stage and their gradients to the stage before, each micro-batch"
    shared_name = "gradient of a weight that stages have in common, once a step"
    return [
        Term(name, "send", sent_bytes, cell.pp, calls=message_count, axis="pp"),
        *(Term(shared_name, "all_reduce", elements * element_bytes, holders, axis="pp") for elements, holders in part.tied),
        Term("the loss, from the last stage to all", "broadcast", SCALAR_BYTES, cell.pp, axis="pp"),
    ]  # fmt: skip
