"""Computes the peak memory of a step with a formula, by category, for the rank that needs most memory.

The peak is one of the moments of forward and backward (step_moments.py), or the optimizer's step with its temporary copies.
The sizes of tensors follow from the sizes of the model. CUDA context, NCCL's buffers and fragmentation come from terms.yaml.

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
from trainers.theory.division import Division

MIB = 1 << 20
STATES = {"adam": 2, "adamw": 2}  # tensors of a parameter's size that the optimizer keeps; sgd keeps one if it has momentum
CROSS_ENTROPY_CHUNK = 2**25 * 4  # bytes; the loss casts 2**25 logits to fp32 at a time (trainers/cross_entropy.py)
# The share of the saved activations of a block that gradients of activations take at a time: when backward is in the MLP of
# GPT-2, of 12 widths, those before and behind GELU (8) and of the hidden state (1), while the saved tensor behind GELU is free
ACTIVATION_GRADIENTS = 5 / 12
FORMULA_ERROR = 0.05  # the largest difference from a rehearsal that the tests allow
NON_TENSORS = ("cuda_context", "nccl_buffers", "fragmentation")  # the categories of memory that are not tensors
COMPILED_SHARE = 0.6  # smallest share of activations saved with torch.compile, which may recompute operators; assumed


class MemoryTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of terms.yaml: a part of the memory that no formula gives. The comments of that file explain the fields."""

    low: float
    likely: float
    high: float
    source: str

    def range(self, unit: float = 1.0) -> PredictedRange:
        """The range of the entry, multiplied by `unit`."""
        return PredictedRange(self.low * unit, self.likely * unit, self.high * unit)


@functools.cache
def memory_terms() -> dict[str, MemoryTerm]:
    """The entries of terms.yaml, by name: the parts of the memory that no formula gives."""
    content = resources.files("jobs.planner").joinpath("terms.yaml").read_bytes()
    return msgspec.yaml.decode(content, type=dict[str, MemoryTerm])


class StepMemoryTerms(msgspec.Struct, frozen=True):
    """The peak memory of a step."""

    by_category: dict[str, PredictedRange]
    """The bytes of each category at the peak."""
    complete: bool
    """False if the memory of activations is not known, so that the peak is a lower bound."""

    @property
    def tensors(self) -> PredictedRange:
        """The bytes of all categories that are tensors."""
        return sum_ranges({name: term for name, term in self.by_category.items() if name not in NON_TENSORS})

    @property
    def bytes(self) -> PredictedRange:
        """The bytes of all categories."""
        return sum_ranges(self.by_category)


def predict_memory(cell: Cell, *, micro_batch: int | None = None, on_gpu: bool = True) -> StepMemoryTerms:
    """The memory of a cell. micro_batch: a value to use instead of the cell's micro_batch_size. on_gpu: whether ranks have
    GPUs."""
    facts = model_facts.find_model_facts(cell)
    division = sharding.divide_model(cell, facts.parameters)
    micro = micro_batch or cell.micro_batch_size
    parts = [_rank_memory(cell, facts, division, share, micro) for share in pipeline_share.compute_shares(cell, facts)]
    largest_part = max(parts, key=lambda part: sum_ranges(part).likely)
    if on_gpu:
        largest_part = {**largest_part, **predict_non_tensor_bytes(cell, sum_ranges(largest_part))}
    return StepMemoryTerms({name: term for name, term in largest_part.items() if term.high > 0}, facts.saved is not None)


def predict_non_tensor_bytes(cell: Cell, tensors: PredictedRange) -> dict[str, PredictedRange]:
    """The bytes of GPU memory that are used for other things than tensors, by category. tensors: the bytes of all tensors."""
    # torch makes a communicator of all ranks when they meet, also if there is one rank; meshes with several dimensions have one
    # more for each dimension. With parameter servers, ranks meet over Gloo.
    dimensions = sum(size > 1 for size in (cell.dp, cell.tp, cell.pp))
    communicators = 0 if cell.servers else 1 + (dimensions if dimensions > 1 else 0)
    share = memory_terms()["fragmentation"]
    return {
        "cuda_context": memory_terms()["cuda_context"].range(MIB),
        "nccl_buffers": memory_terms()["nccl_buffers"].range(MIB * communicators),
        "fragmentation": PredictedRange(tensors.low * share.low, tensors.likely * share.likely, tensors.high * share.high),
    }


def _rank_memory(cell: Cell, facts: ModelFacts, division: Division, share: StageShare, micro: int) -> dict[str, PredictedRange]:
    """The bytes of each category at the peak, on the rank that has the part `share` of the model."""
    part, activations = _find_rank_part(cell, facts, share), _count_activations(cell, facts, share, micro)
    kept_bytes = division.kept_gradient_bytes
    if cell.pp > 1 and kept_bytes and cell.gradient_accumulation_steps <= share.kept_micro_batches:
        # When the first backward of a pipeline begins, there are no gradients of earlier passes yet. When the last one begins,
        # only the activations of its own micro-batch are left.
        first = msgspec.structs.replace(division, kept_gradient_bytes=0.0, gradient_bytes=int(kept_bytes), gradient_ranks=1)
        moments = step_moments.list_moments(first, part, activations)
        activations = activations._replace(kept_bytes=activations.of_pass)
    else:
        moments = []
    moments += step_moments.list_moments(division, part, activations)
    moments.append(_optimizer_moment(cell, facts, division, part))
    if facts.saved is None:
        # The memory of this model is a lower bound, so tensors that exist only for a moment do not count.
        moments = [{name: size for name, size in moment.items() if name != "temporary"} for moment in moments]
    peak = max(moments, key=lambda moment: sum(moment.values()))
    shard_ranks, on_gpu = max(1, division.optimizer_ranks), division.optimizer_ranks > 0
    peak |= {
        "parameter": division.weight_bytes * part.parameters / division.weight_ranks,
        "optimizer_state": count_state_bytes(cell) * part.parameters / shard_ranks if on_gpu else 0.0,
        "master_parameter": division.master_bytes * part.parameters / shard_ranks if on_gpu else 0.0,
        "buffer": 0.0 if facts.saved is None else _count_buffer_bytes(cell, division, part, share, facts.saved, micro),
    }
    return {name: _make_range(cell, facts, name, size) for name, size in peak.items()}


def _find_rank_part(cell: Cell, facts: ModelFacts, share: StageShare) -> RankPart:
    """The parameters of a rank. If FSDP does not wrap blocks, all parameters are outside of blocks."""
    front, back = facts.front if share.first else 0, facts.back if share.last else 0
    tied = facts.tied if share.first and share.last else 0
    block, unit = facts.block_parameters / cell.tp, facts.largest_block / cell.tp
    if cell.options.get("wrap") == "none":
        return RankPart(0, 0.0, 0.0, front + facts.blocks * facts.block_parameters, back, tied)
    kind, _, segments = cell.activation_checkpointing.partition("-")
    return RankPart(share.blocks, block, unit, front, back, tied, share.blocks // int(segments) if kind == "segments" else 1)


def _make_range(cell: Cell, facts: ModelFacts, name: str, size: float) -> PredictedRange:
    low, high = size * (1 - FORMULA_ERROR), size * (1 + FORMULA_ERROR)
    if name != "activation" or facts.saved is None:
        return PredictedRange(low, size, high)
    if facts.kind == "convolution" and cell.activation_checkpointing != "none":
        # The blocks of a convolutional network differ in size. So, with activation checkpointing, it is certain only that the
        # saved activations are at least the activations of one block and at most the activations of all blocks.
        block_bytes = facts.saved.block_whole * cell.micro_batch_size
        return PredictedRange(min(low, block_bytes), size, max(high, facts.blocks * block_bytes))
    return PredictedRange(low * (COMPILED_SHARE if cell.compile else 1.0), size, high)


def _count_buffer_bytes(
    cell: Cell, division: Division, part: RankPart, share: StageShare, saved: SavedBytes, micro: int
) -> float:
    """The bytes of the batches of a step, and of buffers that stay allocated."""
    passes = cell.gradient_accumulation_steps
    size = division.buffer_bytes * part.parameters + division.bucket_bytes * division.bucket_elements
    size += passes * micro * saved.inputs
    if cell.pp > 1:
        # Each stage has a buffer for each hidden state, and for each gradient, that it receives in a step. The schedule needs
        # one batch of all micro-batches, which is a copy, and its inputs may be cast to 16 bits.
        received = 2 * cell.stages_per_rank - share.first - share.last
        cast_bytes = _count_cast_bytes(cell, saved) if precision.stream_bytes(cell.precision) == 2 else 0.0
        size += passes * micro * (received * saved.block_input + saved.inputs + cast_bytes)
    return size


def _count_cast_bytes(cell: Cell, saved: SavedBytes) -> float:
    """The bytes per item of a 16-bit copy of the batch. Tokens are not cast."""
    return saved.inputs / 2 if _element_bytes(cell) == 2 and cell.seq_len is None else 0.0


def _optimizer_moment(cell: Cell, facts: ModelFacts, division: Division, part: RankPart) -> dict[str, float]:
    """The bytes of categories in the optimizer's step."""
    shard_ranks, is_unfused = max(1, division.optimizer_ranks), cell.optimizer.name in STATES and not cell.optimizer.fused
    # Without fused kernels, torch's foreach optimizer makes a temporary tensor of the size and type of each weight of a group.
    # With tensor parallelism, split and whole weights are two groups.
    has_one_group = cell.tp == 1 or facts.head_share < 1
    group = part.parameters if has_one_group else max(part.outside, part.parameters - part.outside)
    copies = (2 if cell.precision == "bf16-pure" else 4) * group / shard_ranks
    norm = division.norm_bytes * min(max(part.front, part.back), part.parameters / shard_ranks)
    return {
        "gradient": division.gradient_bytes * part.parameters / division.gradient_ranks,
        "temporary": max(norm, copies if is_unfused and division.optimizer_ranks else 0.0),
    }


def count_state_bytes(cell: Cell) -> int:
    """Bytes of optimizer state per parameter: torch keeps it in the dtype of the weights, DeepSpeed's copy is fp32."""
    rule = cell.optimizer
    tensors = STATES.get(rule.name, 1 if rule.momentum else 0)
    return tensors * (2 if cell.precision == "bf16-pure" else 4)


def _count_activations(cell: Cell, facts: ModelFacts, share: StageShare, micro: int) -> Activations:
    """The memory of activations when backward begins."""
    if (saved := facts.saved) is None:
        return Activations()
    block = count_saved_block_bytes(cell, saved) * micro + saved.weights / cell.tp
    block_input = saved.block_input * micro / (cell.tp if cell.options.get("sequence_parallel") is True else 1)
    recomputed, recomputed_blocks = _find_recomputed(cell.activation_checkpointing, share.numbers)
    of_pass = (share.blocks - sum(recomputed)) * block + len(recomputed) * block_input
    # Of blocks that cannot be split, only the sum is known. In GPT-2, the 12 widths are among 16.
    gradients = ACTIVATION_GRADIENTS * saved.block_split / cell.tp or 12 / 16 * ACTIVATION_GRADIENTS * saved.block_whole
    in_backward = recomputed_blocks * block + gradients * micro
    # Until forward ends, autocast keeps its copies of weights, also those of blocks that save nothing.
    copies = sum(recomputed) * saved.weights / cell.tp
    kept_bytes = share.kept_micro_batches * of_pass
    if not share.last:
        return Activations(kept_bytes, of_pass, in_backward, chunk=copies)
    head, logits = saved.head * micro + saved.head_weights, saved.logits * micro
    count = 1.0
    if cell.pp > 1:  # the first stage saves the 16-bit copy of the images, which is a part of the buffers
        head, count = head - _count_cast_bytes(cell, saved) * micro, share.kept_micro_batches
    # The loss casts logits that are not yet in fp32, and computes their log-softmax.
    # Split logits are cast in every precision, because their log-softmax is computed in two steps.
    casts = _element_bytes(cell) == 2 or facts.head_share < 1
    chunk = min(CROSS_ENTROPY_CHUNK, 4 * logits / _element_bytes(cell)) * (2 if casts else 1)
    return Activations(
        kept_bytes=kept_bytes,
        of_pass=of_pass,
        in_backward=in_backward,
        head=count * head,
        # a rank with several stages frees the logits when it has computed the gradients of the last stage
        head_left=(count - 1) * head + (logits if cell.stages_per_rank == 1 else 0.0),
        head_weights=saved.head_weights if cell.precision in precision.AUTOCAST else 0.0,
        logits=count * logits,
        logits_of_pass=logits,
        chunk=max(chunk, copies) if cell.pp > 1 else chunk + copies,  # a pipeline computes the loss outside of autocast
    )


def count_saved_block_bytes(cell: Cell, saved: SavedBytes) -> float:
    """The bytes that one block saves for backward per item, on one of the tensor-parallel ranks."""
    sequence = cell.tp if cell.options.get("sequence_parallel") is True else 1
    whole = (saved.block_whole - saved.block_gathered) / sequence + saved.block_gathered
    return whole + saved.block_split / cell.tp


def _element_bytes(cell: Cell) -> int:
    return 4 if cell.precision in ("fp32", "tf32") else 2


def _find_recomputed(mode: str, numbers: Sequence[int]) -> tuple[list[int], int]:
    """Returns (for each unit of activation checkpointing, which keeps only its input, the number of its blocks; the number of
    blocks whose recomputed activations exist in addition to the saved ones).

    mode: the value of the key activation_checkpointing. numbers: the numbers of the blocks of a rank."""
    kind, _, value = mode.partition("-")
    if kind == "none" or not numbers:
        return [], 0
    if kind == "segments":  # the last segment is not recomputed, and its activations are free when the others are
        bounds = [len(numbers) * index // int(value) for index in range(int(value))]
        return [end - begin for begin, end in pairwise(bounds)], 0
    interval = 1 if kind == "full" else int(value)
    # Backward has freed the activations of a block behind the last recomputed block.
    return [1] * sum(number % interval == 0 for number in numbers), int(numbers[-1] % interval == 0)
