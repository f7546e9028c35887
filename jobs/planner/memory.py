"""Computes the peak memory of a step with a formula, by category, for the rank that needs most memory.

The peak is one of the moments of forward and backward (step_moments.py), or the optimizer's step with its temporary copies.
The sizes of tensors follow from the sizes of the model (model_facts.py, counted.yaml). CUDA context, NCCL's buffers and
fragmentation come from terms.yaml.

With AdamW, the model states of plain data parallelism are 16 bytes per parameter (Rajbhandari et al., ZeRO, 2020, section 3.1):
4 for fp32 weights, 4 for gradients and 8 for Adam's two states; bf16 and fp16 add 2 for 16-bit copies of the weights, which are
used for computing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise

import msgspec

from jobs.planner import model_facts, pipeline_share, sharding, step_moments
from jobs.planner.model_facts import ModelFacts
from jobs.planner.pipeline_share import StageShare
from jobs.planner.step_moments import Activations, RankPart
from shardlab.matrix.cell import Cell
from shardlab.plugins.plugin_kind import SavedBytes
from shardlab.runs.prediction import PredictedRange, sum_ranges
from trainers.model import precision
from trainers.strategy_options import Fsdp1Options, TensorOptions
from trainers.theory.division import Division

MIB = 1 << 20
CROSS_ENTROPY_CHUNK = 2**25 * 4  # bytes; the loss casts 2**25 logits to fp32 at a time (trainers/cross_entropy.py)
# The share of the saved activations of a block that gradients of activations take at a time: when backward is in the MLP of
# GPT-2, of 12 widths, those before and behind GELU (8) and of the hidden state (1), while the saved tensor behind GELU is free
ACTIVATION_GRADIENTS = 5 / 12
FORMULA_ERROR = 0.05  # the largest difference from a rehearsal that the tests allow
NON_TENSOR_CATEGORIES = ("cuda_context", "nccl_buffers", "fragmentation")  # the categories of memory that are not tensors
COMPILED_SHARE = 0.6  # smallest share of activations saved with torch.compile, which may recompute operators; assumed


class MemoryTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of terms.yaml: a part of the memory that no formula gives. The comments of that file explain the fields."""

    low: float
    likely: float
    high: float
    source: str

    def scale(self, factor: float = 1.0) -> PredictedRange:
        """The range of the entry, multiplied by `factor`."""
        return PredictedRange(self.low * factor, self.likely * factor, self.high * factor)


@functools.cache
def read_memory_terms() -> dict[str, MemoryTerm]:
    """The entries of terms.yaml, by name: the parts of the memory that no formula gives."""
    yaml_bytes = resources.files("jobs.planner").joinpath("terms.yaml").read_bytes()
    return msgspec.yaml.decode(yaml_bytes, type=dict[str, MemoryTerm])


class StepMemoryTerms(msgspec.Struct, frozen=True):
    """The peak memory of a step."""

    bytes_by_category: dict[str, PredictedRange]
    """The bytes of each category at the peak."""
    is_complete: bool
    """False if the memory of activations is not known, so that the peak is a lower bound."""

    @property
    def tensor_bytes(self) -> PredictedRange:
        """The bytes of all categories that are tensors."""
        return sum_ranges({name: term for name, term in self.bytes_by_category.items() if name not in NON_TENSOR_CATEGORIES})

    @property
    def total_bytes(self) -> PredictedRange:
        """The bytes of all categories."""
        return sum_ranges(self.bytes_by_category)


def predict_memory(cell: Cell, *, micro_batch: int | None = None, on_gpu: bool = True) -> StepMemoryTerms:
    """The memory of a cell. micro_batch: a value to use instead of the cell's micro_batch_size. on_gpu: whether ranks have
    GPUs."""
    facts = model_facts.find_model_facts(cell)
    division = sharding.divide_model(cell, facts.parameters)
    micro_batch_size = micro_batch or cell.micro_batch_size
    rank_memories = [
        _predict_rank_memory(cell, facts, division, stage_share, micro_batch_size)
        for stage_share in pipeline_share.compute_shares(cell, facts)
    ]
    largest_memory = max(rank_memories, key=lambda rank_memory: sum_ranges(rank_memory).likely)
    if on_gpu:
        largest_memory = {**largest_memory, **predict_non_tensor_bytes(cell, sum_ranges(largest_memory))}
    return StepMemoryTerms(
        {category: term for category, term in largest_memory.items() if term.high > 0}, facts.saved_bytes is not None
    )


def predict_non_tensor_bytes(cell: Cell, tensor_bytes: PredictedRange) -> dict[str, PredictedRange]:
    """The bytes of GPU memory that are used for other things than tensors, by category. tensor_bytes: those of tensors."""
    # torch makes a communicator of all ranks when they meet, also if there is one rank; meshes with several dimensions have one
    # more for each dimension. With parameter servers, ranks meet over Gloo.
    dimension_count = sum(degree > 1 for degree in (cell.dp, cell.tp, cell.pp))
    communicator_count = 0 if cell.servers else 1 + (dimension_count if dimension_count > 1 else 0)
    fragmentation_share = read_memory_terms()["fragmentation"]
    return {
        "cuda_context": read_memory_terms()["cuda_context"].scale(MIB),
        "nccl_buffers": read_memory_terms()["nccl_buffers"].scale(MIB * communicator_count),
        "fragmentation": PredictedRange(
            tensor_bytes.low * fragmentation_share.low,
            tensor_bytes.likely * fragmentation_share.likely,
            tensor_bytes.high * fragmentation_share.high,
        ),
    }


def _predict_rank_memory(
    cell: Cell, facts: ModelFacts, division: Division, stage_share: StageShare, micro_batch_size: int
) -> dict[str, PredictedRange]:
    """The bytes of each category at the peak, on the rank that has the part `stage_share` of the model."""
    rank_part = _find_rank_part(cell, facts, stage_share)
    activations = _count_activations(cell, facts, stage_share, micro_batch_size)
    kept_gradient_bytes = division.kept_gradient_bytes
    if cell.pp > 1 and kept_gradient_bytes and cell.gradient_accumulation_steps <= stage_share.kept_micro_batches:
        # When the first backward of a pipeline begins, there are no gradients of earlier passes yet. When the last one begins,
        # only the activations of its own micro-batch are left.
        first_pass_division = msgspec.structs.replace(
            division, kept_gradient_bytes=0.0, gradient_bytes=int(kept_gradient_bytes), gradient_ranks=1
        )
        moments = step_moments.list_moments(first_pass_division, rank_part, activations)
        activations = activations._replace(kept_bytes=activations.pass_bytes)
    else:
        moments = []
    moments += step_moments.list_moments(division, rank_part, activations)
    moments.append(_count_optimizer_moment(cell, facts, division, rank_part))
    if facts.saved_bytes is None:
        # The memory of this model is a lower bound, so tensors that exist only for a moment do not count.
        moments = [
            {category: category_bytes for category, category_bytes in moment.items() if category != "temporary"}
            for moment in moments
        ]
    peak_moment = max(moments, key=lambda moment: sum(moment.values()))
    shard_ranks, on_gpu = max(1, division.optimizer_ranks), division.optimizer_ranks > 0
    peak_moment |= {
        "parameter": division.weight_bytes * rank_part.parameters / division.weight_ranks,
        "optimizer_state": count_state_bytes(cell) * rank_part.parameters / shard_ranks if on_gpu else 0.0,
        "master_parameter": division.master_bytes * rank_part.parameters / shard_ranks if on_gpu else 0.0,
        "buffer": 0.0
        if facts.saved_bytes is None
        else _count_buffer_bytes(cell, division, rank_part, stage_share, facts.saved_bytes, micro_batch_size),
    }
    return {category: _widen_bytes(cell, facts, category, category_bytes) for category, category_bytes in peak_moment.items()}


def _find_rank_part(cell: Cell, facts: ModelFacts, stage_share: StageShare) -> RankPart:
    """The parameters of a rank. If FSDP does not wrap blocks, all parameters are outside of blocks."""
    front_parameters = facts.front_parameters if stage_share.has_first_stage else 0
    back_parameters = facts.back_parameters if stage_share.has_last_stage else 0
    tied_parameters = facts.tied_parameters if stage_share.has_first_stage and stage_share.has_last_stage else 0
    block_parameters, largest_block = facts.block_parameters / cell.tp, facts.largest_block_parameters / cell.tp
    if Fsdp1Options(cell.options).wrap == "none":
        return RankPart(
            0, 0.0, 0.0, front_parameters + facts.block_count * facts.block_parameters, back_parameters, tied_parameters
        )
    checkpointing_mode, _, segment_count = cell.activation_checkpointing.partition("-")
    return RankPart(
        stage_share.block_count,
        block_parameters,
        largest_block,
        front_parameters,
        back_parameters,
        tied_parameters,
        stage_share.block_count // int(segment_count) if checkpointing_mode == "segments" else 1,
    )


def _widen_bytes(cell: Cell, facts: ModelFacts, category: str, formula_bytes: float) -> PredictedRange:
    low_bytes, high_bytes = formula_bytes * (1 - FORMULA_ERROR), formula_bytes * (1 + FORMULA_ERROR)
    if category != "activation" or facts.saved_bytes is None:
        return PredictedRange(low_bytes, formula_bytes, high_bytes)
    if facts.model_kind == "convolution" and cell.activation_checkpointing != "none":
        # The blocks of a convolutional network differ in size. So, with activation checkpointing, it is certain only that the
        # saved activations are at least the activations of one block and at most the activations of all blocks.
        block_bytes = facts.saved_bytes.block_whole * cell.micro_batch_size
        return PredictedRange(min(low_bytes, block_bytes), formula_bytes, max(high_bytes, facts.block_count * block_bytes))
    return PredictedRange(low_bytes * (COMPILED_SHARE if cell.compile else 1.0), formula_bytes, high_bytes)


def _count_buffer_bytes(
    cell: Cell, division: Division, rank_part: RankPart, stage_share: StageShare, saved: SavedBytes, micro_batch_size: int
) -> float:
    """The bytes of the batches of a step, and of buffers that stay allocated."""
    pass_count = cell.gradient_accumulation_steps
    buffer_sum_bytes = division.buffer_bytes * rank_part.parameters + division.bucket_bytes * division.bucket_elements
    buffer_sum_bytes += pass_count * micro_batch_size * saved.inputs
    if cell.pp > 1:
        # Each stage has a buffer for each hidden state, and for each gradient, that it receives in a step. The schedule needs
        # one batch of all micro-batches, which is a copy, and its inputs may be cast to 16 bits.
        received_tensors = 2 * cell.stages_per_rank - stage_share.has_first_stage - stage_share.has_last_stage
        cast_bytes = _count_cast_bytes(cell, saved) if precision.stream_bytes(cell.precision) == 2 else 0.0
        buffer_sum_bytes += pass_count * micro_batch_size * (received_tensors * saved.block_input + saved.inputs + cast_bytes)
    return buffer_sum_bytes


def _count_cast_bytes(cell: Cell, saved: SavedBytes) -> float:
    """The bytes per item of a 16-bit copy of the batch. Tokens are not cast."""
    return saved.inputs / 2 if _count_element_bytes(cell) == 2 and cell.seq_len is None else 0.0


def _count_optimizer_moment(cell: Cell, facts: ModelFacts, division: Division, rank_part: RankPart) -> dict[str, float]:
    """The bytes of categories in the optimizer's step."""
    shard_ranks = max(1, division.optimizer_ranks)
    is_unfused = cell.optimizer.name != "sgd" and not cell.optimizer.fused
    # Without fused kernels, torch's foreach optimizer makes a temporary tensor of the size and type of each weight of a group.
    # With tensor parallelism, split and whole weights are two groups.
    has_one_group = cell.tp == 1 or facts.head_share < 1
    group_parameters = (
        rank_part.parameters
        if has_one_group
        else max(rank_part.outside_parameters, rank_part.parameters - rank_part.outside_parameters)
    )
    copy_bytes = (2 if cell.precision == "bf16-pure" else 4) * group_parameters / shard_ranks
    norm_bytes = division.norm_bytes * min(
        max(rank_part.front_parameters, rank_part.back_parameters), rank_part.parameters / shard_ranks
    )
    return {
        "gradient": division.gradient_bytes * rank_part.parameters / division.gradient_ranks,
        "temporary": max(norm_bytes, copy_bytes if is_unfused and division.optimizer_ranks else 0.0),
    }


def count_state_bytes(cell: Cell) -> int:
    """Bytes of optimizer state per parameter: torch keeps it in the dtype of the weights, DeepSpeed's copy is fp32."""
    return cell.optimizer.state_tensor_count * (2 if cell.precision == "bf16-pure" else 4)


def _count_activations(cell: Cell, facts: ModelFacts, stage_share: StageShare, micro_batch_size: int) -> Activations:
    """The memory of activations when backward begins."""
    if (saved := facts.saved_bytes) is None:
        return Activations()
    block_bytes = count_saved_block_bytes(cell, saved) * micro_batch_size + saved.weights / cell.tp
    block_input_bytes = saved.block_input * micro_batch_size / (cell.tp if TensorOptions(cell.options).sequence_parallel else 1)
    unit_blocks, recomputed_blocks = _find_recomputed_units(cell.activation_checkpointing, stage_share.block_numbers)
    pass_bytes = (stage_share.block_count - sum(unit_blocks)) * block_bytes + len(unit_blocks) * block_input_bytes
    # Of blocks that cannot be split, only the sum is known. In GPT-2, the 12 widths are among 16.
    gradient_bytes = ACTIVATION_GRADIENTS * saved.block_split / cell.tp or 12 / 16 * ACTIVATION_GRADIENTS * saved.block_whole
    backward_bytes = recomputed_blocks * block_bytes + gradient_bytes * micro_batch_size
    # Until forward ends, autocast keeps its copies of weights, also those of blocks that save nothing.
    copy_bytes = sum(unit_blocks) * saved.weights / cell.tp
    kept_bytes = stage_share.kept_micro_batches * pass_bytes
    if not stage_share.has_last_stage:
        return Activations(kept_bytes, pass_bytes, backward_bytes, chunk_bytes=copy_bytes)
    head_bytes, logit_bytes = saved.head * micro_batch_size + saved.head_weights, saved.logits * micro_batch_size
    kept_passes = 1.0
    if cell.pp > 1:  # the first stage saves the 16-bit copy of the images, which is a part of the buffers
        head_bytes, kept_passes = head_bytes - _count_cast_bytes(cell, saved) * micro_batch_size, stage_share.kept_micro_batches
    # The loss casts logits that are not yet in fp32, and computes their log-softmax.
    # Split logits are cast in every precision, because their log-softmax is computed in two steps.
    casts_logits = _count_element_bytes(cell) == 2 or facts.head_share < 1
    chunk_bytes = min(CROSS_ENTROPY_CHUNK, 4 * logit_bytes / _count_element_bytes(cell)) * (2 if casts_logits else 1)
    return Activations(
        kept_bytes=kept_bytes,
        pass_bytes=pass_bytes,
        backward_bytes=backward_bytes,
        head_bytes=kept_passes * head_bytes,
        # a rank with several stages frees the logits when it has computed the gradients of the last stage
        head_left_bytes=(kept_passes - 1) * head_bytes + (logit_bytes if cell.stages_per_rank == 1 else 0.0),
        head_weight_bytes=saved.head_weights if cell.precision in precision.AUTOCAST else 0.0,
        logit_bytes=kept_passes * logit_bytes,
        pass_logit_bytes=logit_bytes,
        chunk_bytes=max(chunk_bytes, copy_bytes)
        if cell.pp > 1
        else chunk_bytes + copy_bytes,  # a pipeline computes the loss outside of autocast
    )


def count_saved_block_bytes(cell: Cell, saved: SavedBytes) -> float:
    """The bytes that one block saves for backward per item, on one of the tensor-parallel ranks."""
    sequence_ranks = cell.tp if TensorOptions(cell.options).sequence_parallel else 1
    whole_bytes = (saved.block_whole - saved.block_gathered) / sequence_ranks + saved.block_gathered
    return whole_bytes + saved.block_split / cell.tp


def _count_element_bytes(cell: Cell) -> int:
    return 4 if cell.precision in ("fp32", "tf32") else 2


def _find_recomputed_units(checkpointing_mode: str, block_numbers: Sequence[int]) -> tuple[list[int], int]:
    """Returns (for each unit of activation checkpointing, which keeps only its input, the number of its blocks; the number of
    blocks whose recomputed activations exist in addition to the saved ones).

    checkpointing_mode: the value of the key activation_checkpointing. block_numbers: the numbers of the blocks of a rank."""
    mode_name, _, mode_number = checkpointing_mode.partition("-")
    if mode_name == "none" or not block_numbers:
        return [], 0
    if mode_name == "segments":  # the last segment is not recomputed, and its activations are free when the others are
        segment_bounds = [len(block_numbers) * index // int(mode_number) for index in range(int(mode_number))]
        return [end - begin for begin, end in pairwise(segment_bounds)], 0
    interval = 1 if mode_name == "full" else int(mode_number)
    # Backward has freed the activations of a block behind the last recomputed block.
    return [1] * sum(block_number % interval == 0 for block_number in block_numbers), int(block_numbers[-1] % interval == 0)
