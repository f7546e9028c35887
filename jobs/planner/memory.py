"""Computes the peak memory of a step with a formula, by category, for the rank that needs most memory.

Three moments can be the peak: the begin of backward, when all activations are saved; the end of backward, when all gradients
exist; and the optimizer's step with its temporary copies. The sizes of tensors follow from the sizes of the model; they are
ranges only where they depend on the order of operations. CUDA context, NCCL's buffers and fragmentation come from terms.yaml.

With AdamW, the model states of plain data parallelism are 16 bytes per parameter (Rajbhandari et al., ZeRO, 2020, section 3.1):
4 for fp32 weights, 4 for gradients and 8 for Adam's two states; bf16 and fp16 add 2 for 16-bit copies of the weights, which are
used for computing.
"""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from jobs.planner import model_facts, pipeline_share, sharding
from jobs.planner.model_facts import ModelFacts
from jobs.planner.pipeline_share import StageShare
from shardlab.matrix.cell import Cell
from shardlab.plugins.plugin_kind import SavedBytes
from shardlab.runs.prediction import ZERO, PredictedRange, exact_range, sum_ranges
from trainers.theory.division import Division

MIB = 1 << 20
STATES = {"adam": 2, "adamw": 2}  # tensors of a parameter's size that the optimizer keeps; sgd keeps one if it has momentum
# bytes; the loss casts 2**25 logits to fp32 at a time, and needs two such tensors (trainers/cross_entropy.py)
CROSS_ENTROPY_CHUNK = 2 * 2**25 * 4
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
    division = sharding.divide(cell, facts.parameters)
    micro = micro_batch or cell.micro_batch_size
    parts = [_rank_memory(cell, facts, division, share, micro) for share in pipeline_share.compute_end_shares(cell, facts)]
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
    block_parameters, outside = (share.blocks * facts.block_parameters / cell.tp, _count_outside_parameters(facts, share))
    parameters = block_parameters + outside
    activation, temporary = _predict_activations(cell, facts, share, micro)
    block = facts.largest_block / cell.tp
    gathered, buckets = _predict_gathered(division, parameters, block, outside)
    state_bytes = _state_bytes_per_parameter(cell) * parameters
    shard_ranks = max(1, division.optimizer_ranks)
    on_gpu = division.optimizer_ranks > 0
    persistent = {
        "parameter": exact_range(division.weight_bytes * parameters / division.weight_ranks),
        "optimizer_state": exact_range(state_bytes / shard_ranks if on_gpu else 0),
        "master_parameter": exact_range(division.master_bytes * parameters / shard_ranks if on_gpu else 0),
    }
    gradients = (division.gradient_bytes * parameters / division.gradient_ranks, division.whole_gradient_bytes * parameters)
    gradient = exact_range(sum(gradients))
    copied_bytes = exact_range(division.copy_bytes * parameters)
    if facts.saved is None:
        # The memory of this model is a lower bound, and these parts need not exist at the same moment. So only the largest of
        # sharded gradients, whole gradients and gathered weights counts, and no buffer.
        gradient = msgspec.structs.replace(gradient, low=max(gradients))
        gathered, copied_bytes = (
            msgspec.structs.replace(weights, low=max(0.0, weights.low - gradient.low)) for weights in (gathered, copied_bytes)
        )
        buckets = msgspec.structs.replace(buckets, low=0.0)
    at_backward_begin = {
        **persistent,
        "gathered": gathered,
        "gradient": gradient if division.keeps_gradients else ZERO,
        "activation": activation,
        "temporary": temporary,
        "buffer": buckets,
    }
    at_backward_end = {**persistent, "gathered": gathered, "gradient": gradient, "activation": ZERO, "buffer": buckets}
    is_unfused = cell.optimizer.name in STATES and not cell.optimizer.fused
    # Without fused kernels, torch's foreach optimizer makes a temporary tensor of the size and type of each weight.
    copies = exact_range((2 if cell.precision == "bf16-pure" else 4) * parameters / shard_ranks if is_unfused and on_gpu else 0)
    at_optimizer_step = {**at_backward_end, "gathered": copied_bytes, "temporary": copies}
    return max((at_backward_begin, at_backward_end, at_optimizer_step), key=lambda moment: sum_ranges(moment).likely)


def _count_outside_parameters(facts: ModelFacts, share: StageShare) -> int:
    """The number of parameters outside of blocks on a rank. If the first and the last layer share the table of embeddings, the
    first and the last rank of a pipeline hold one copy each."""
    tied = facts.tied if share.first and share.last else 0
    return (facts.front if share.first else 0) + (facts.back if share.last else 0) - tied


def _state_bytes_per_parameter(cell: Cell) -> int:
    """Bytes of optimizer state per parameter: torch keeps it in the dtype of the weights, DeepSpeed's copy is fp32."""
    rule = cell.optimizer
    tensors = STATES.get(rule.name, 1 if rule.momentum else 0)
    return tensors * (2 if cell.precision == "bf16-pure" else 4)


def _predict_gathered(
    division: Division, parameters: float, block: float, outside: float
) -> tuple[PredictedRange, PredictedRange]:
    """The memory for using sharded weights: (bytes of weights that a rank gathers or copies for a computation and then frees,
    bytes of buffers of collectives)."""
    fixed_bytes = exact_range(division.bucket_bytes + division.bucket_parameters * parameters)
    if division.gathers == "nothing":
        return exact_range(division.copy_bytes * parameters), fixed_bytes
    block_bytes = division.gathered_bytes * block
    # Two blocks are gathered at a time, the block that computes and the next block, each with the buffer of its all-gather. The
    # layers outside of blocks stay gathered from forward to backward.
    outside_bytes = division.gathered_bytes * outside
    all_bytes = division.gathered_bytes * parameters
    if division.gathers == "everything":
        gathered = PredictedRange(all_bytes, all_bytes, all_bytes + block_bytes)
    else:
        gathered = PredictedRange(
            min(all_bytes, block_bytes + outside_bytes),
            min(all_bytes, 2 * block_bytes + outside_bytes),
            min(2 * all_bytes, 4 * block_bytes + outside_bytes),
        )
    # The bytes of the gradient of a block as backward computes it, and of the input of its reduce-scatter.
    gradient_bytes = (division.gathered_bytes + 4) * block
    largest_gradient_bytes = max(gradient_bytes, (division.gathered_bytes + 4) * outside)
    return gathered, fixed_bytes + PredictedRange(gradient_bytes / 2, gradient_bytes, gradient_bytes + largest_gradient_bytes)


def _predict_activations(cell: Cell, facts: ModelFacts, share: StageShare, micro: int) -> tuple[PredictedRange, PredictedRange]:
    """The memory of activations when backward begins: (bytes that are saved, bytes of tensors that exist only at this
    moment)."""
    saved = facts.saved
    if saved is None:
        return ZERO, ZERO
    block = count_saved_block_bytes(cell, saved) * micro + saved.weights / cell.tp
    block_bytes, kept_input = block, saved.block_input * micro
    kept_in_blocks, recomputed = _checkpointed_bytes(cell.activation_checkpointing, share.blocks, block_bytes, kept_input)
    head_bytes = saved.head * micro + saved.head_weights if share.last else 0.0
    head_count = share.kept_micro_batches if cell.pp > 1 and share.last else 1.0
    kept_bytes = share.kept_micro_batches * kept_in_blocks + head_count * head_bytes + saved.inputs * micro
    # Forward computes the gradient of the logits, so with GPipe it is kept for each micro-batch. When the first block is
    # recomputed, the gradient of its own micro-batch has been used.
    one_gradient = saved.logits * micro if share.last else 0.0
    logits = head_count * one_gradient
    chunk = min(CROSS_ENTROPY_CHUNK, 2 * 4 * one_gradient / _element_bytes(cell))
    momentary = max(logits + chunk, logits - one_gradient + recomputed)
    low = kept_bytes * (COMPILED_SHARE if cell.compile else 1.0)
    if facts.kind == "convolution" and cell.activation_checkpointing != "none":
        # The blocks of a convolutional network differ in size. So, with activation checkpointing, it is certain only that the
        # saved activations are at least the activations of one block and at most the activations of all blocks.
        return PredictedRange(block_bytes, kept_bytes, share.blocks * block_bytes + head_bytes), exact_range(momentary)
    return PredictedRange(low, kept_bytes, kept_bytes * 1.03), PredictedRange(logits, momentary, momentary + block_bytes / 2)


def count_saved_block_bytes(cell: Cell, saved: SavedBytes) -> float:
    """The bytes that one block saves for backward per item, on one of the tensor-parallel ranks."""
    sequence = cell.tp if cell.options.get("sequence_parallel") is True else 1
    return saved.block_whole / sequence + saved.block_split / cell.tp


def _element_bytes(cell: Cell) -> int:
    return 4 if cell.precision in ("fp32", "tf32") else 2


def _checkpointed_bytes(mode: str, blocks: int, block_bytes: float, input_bytes: float) -> tuple[float, float]:
    """The memory of activations with activation checkpointing: (bytes that all blocks keep from forward to backward, bytes that
    exist while one block is recomputed).

    mode: the value of the key activation_checkpointing. block_bytes: the bytes that a block saves without checkpointing.
    input_bytes: the bytes of the input of a block."""
    if mode == "none" or not blocks:
        return blocks * block_bytes, 0.0
    kind, _, number = mode.partition("-")
    if kind == "segments":
        size = -(-blocks // int(number))
        return (int(number) - 1) * input_bytes + size * block_bytes, 0.0  # the last segment is not recomputed
    interval = 1 if kind == "full" else int(number)
    kept_blocks = -(-blocks // interval)
    return kept_blocks * input_bytes + (blocks - kept_blocks) * block_bytes, block_bytes
