"""Predicts how long a GPU computes in a step, by what limits its kernels.

    matrix products, convolutions    operations / (peak * share that such kernels reach). With few rows (the tokens of a
                                     micro-batch), their last wave of tiles leaves multiprocessors without work
    attention                        the same, for the operations that its kernel makes (Dao, FlashAttention-2, 2023): with a
                                     causal mask half of each product, and in backward 5 products for 2 of forward
    all other operators              bytes / bandwidth of the memory: norms, activation functions, residuals and the loss read
                                     and write what autograd saves several times

The head (the layers behind the blocks) counts separately: a pipeline does not split it, tensor parallelism splits only that of
a language model, and activation checkpointing does not recompute it.
"""

from __future__ import annotations

import msgspec

from jobs.planner import device_profile, exchanges, memory
from jobs.planner.model_facts import ModelFacts
from shardlab.hardware import gpu_models
from shardlab.hardware.gpu_models import GpuModel
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import PredictedRange

# Bytes that operators read and write per byte that autograd saves. A saved tensor is written once and read twice, its gradient
# is written and read too, and residuals and masks are not saved. Fitted to benchmarks/published; the range is assumed.
MOVED_BYTES_PER_SAVED = PredictedRange(5.2, 7.5, 9.8)
# What torch.compile leaves of these bytes, because it fuses operators. torchtitan's LLaMA on H100 becomes 16 % faster,
# GPT-2 Large (docs/gpus.md) not at all; the range is assumed.
FUSED_SHARE = PredictedRange(0.4, 0.65, 0.95)
# Seconds of other operators, divided by those of products, for a model whose saved bytes are not known; assumed.
OTHER_OPERATORS_SHARE = PredictedRange(0.0, 0.3, 1.0)
# The number of rows with which matrix products take twice as long as their operations need, for each TFLOP/s of the peak (an
# A100 has 312). Fitted to benchmarks/published: BigScience's models of 200 billion parameters become 10 % faster from 2,048 to
# 8,192 rows on A100, llm-foundry 18 % from 4,096 to 32,768 rows on H100, and GPT-2 Large (docs/gpus.md) 9 % from 8,192 to
# 32,768 rows. The range is assumed.
FEW_ROWS_FACTOR = PredictedRange(0.5, 1.0, 1.5)
ATTENTION_BACKWARD_RATIO = 2.5  # products of the kernel in backward, divided by those in forward
FORWARD_SHARE = 1 / 3  # the share of forward in the operations of forward and backward


class ComputeTime(msgspec.Struct, frozen=True):
    """The seconds that a rank computes for one micro-batch."""

    blocks_s: PredictedRange
    """Its blocks."""
    head_s: PredictedRange
    """The layers behind the blocks, on the last stage of a pipeline."""


def predict_compute_time(cell: Cell, facts: ModelFacts, gpu: GpuModel) -> ComputeTime | None:
    """The time of one micro-batch; None if the operations of the model, or the peak of the GPU at the precision, is unknown."""
    rates, peak_flops = (device_profile.find_rates(gpu, cell.precision), gpu_models.find_model_peak_flops(gpu, cell.precision))
    if rates is None or peak_flops is None or facts.flops_per_item is None:
        return None
    micro_batch, model_ranks = cell.micro_batch_size, cell.tp * cell.pp
    head_flops, attention_flops = facts.head_flops_per_item or 0.0, facts.attention_flops_per_item or 0.0
    block_flops = facts.flops_per_item - head_flops - attention_flops
    recomputed_share = _compute_recomputed_share(cell, facts)
    product_rate = {"transformer": rates.products, "convolution": rates.convolutions}.get(facts.model_kind, rates.unknown)
    if facts.model_kind == "transformer" and (token_rows := (cell.seq_len or 0) * micro_batch):
        few_rows_slowdown = FEW_ROWS_FACTOR.times(peak_flops / 1e12 / token_rows)
        product_rate = PredictedRange(
            product_rate.low / (1 + few_rows_slowdown.high),
            product_rate.likely / (1 + few_rows_slowdown.likely),
            product_rate.high / (1 + few_rows_slowdown.low),
        )
    products_s = divide_by_rate(block_flops * micro_batch * (1 + recomputed_share * FORWARD_SHARE) / model_ranks, product_rate)
    forward_attention = attention_flops * FORWARD_SHARE * (0.5 if facts.is_causal else 1.0)
    attention_s = divide_by_rate(
        forward_attention * micro_batch * (1 + ATTENTION_BACKWARD_RATIO + recomputed_share) / model_ranks, rates.attention
    )
    unaligned_flops = facts.unaligned_flops_per_item * micro_batch if rates.unaligned is not None else 0.0
    head_s = divide_by_rate((head_flops * micro_batch - unaligned_flops) * facts.head_share, product_rate)
    head_s += divide_by_rate(unaligned_flops * facts.head_share, rates.unaligned or product_rate)
    if (saved := facts.saved_bytes) is None:
        return ComputeTime(products_s + attention_s + _multiply_ranges(OTHER_OPERATORS_SHARE, products_s), head_s)
    block_bytes = (
        memory.count_saved_block_bytes(cell, saved) * facts.block_count / cell.pp * (1 + recomputed_share * FORWARD_SHARE)
    )
    head_bytes = saved.head + saved.logits
    return ComputeTime(
        products_s + attention_s + _predict_other_operators_s(cell, gpu, block_bytes * micro_batch),
        head_s + _predict_other_operators_s(cell, gpu, head_bytes * micro_batch),
    )


def divide_by_rate(amount: float, rate: PredictedRange) -> PredictedRange:
    """The seconds that an amount of work takes. amount, rate: FLOPs and FLOP/s, or bytes and bytes per second."""
    return PredictedRange(amount / rate.high, amount / rate.likely, amount / rate.low)


def _compute_recomputed_share(cell: Cell, facts: ModelFacts) -> float:
    """The share of the blocks whose activations are recomputed in backward; of a model without blocks, all or nothing."""
    if cell.activation_checkpointing == "none":
        return 0.0
    return exchanges.count_recomputed_blocks(cell, facts.block_count) / facts.block_count if facts.block_count else 1.0


def _predict_other_operators_s(cell: Cell, gpu: GpuModel, saved_bytes: float) -> PredictedRange:
    """The seconds of the operators that the bandwidth of the memory limits. saved_bytes: what autograd saves."""
    moved_bytes = MOVED_BYTES_PER_SAVED.times(saved_bytes)
    moved_bytes = _multiply_ranges(moved_bytes, FUSED_SHARE) if cell.compile else moved_bytes
    bytes_per_s = device_profile.STREAMED_SHARE.times(gpu.memory_gb_per_s * 1e9)
    return PredictedRange(
        moved_bytes.low / bytes_per_s.high, moved_bytes.likely / bytes_per_s.likely, moved_bytes.high / bytes_per_s.low
    )


def _multiply_ranges(amount: PredictedRange, factor: PredictedRange) -> PredictedRange:
    return PredictedRange(amount.low * factor.low, amount.likely * factor.likely, amount.high * factor.high)
