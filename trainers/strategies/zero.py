"""DeepSpeed's ZeRO: stage 0 shards nothing, stage 1 shards optimizer state, stage 2 also gradients, stage 3 also parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import EVERY_PASS, LAST_PASS
from shardlab.registry import Option
from trainers.model.precision import CAST, MIXED, REASONS, SHARDED
from trainers.strategy import Strategy
from trainers.strategy_options import Zero3Options, ZeroOptions
from trainers.theory.zero import divide_zero, list_zero_terms


def make_refuse(stage: int) -> Callable[[Cell], str | None]:
    """The function `refuse` of the strategy for a ZeRO stage."""

    def refuse(cell: Cell) -> str | None:
        options = ZeroOptions(cell.options)
        if cell.precision == "fp16" and cell.launcher == "fork":
            return "DeepSpeed's fp16 needs a GPU, and the launcher fork runs ranks on the CPU. Allowed: bf16."
        if options.communication_dtype != "fp32" and cell.precision not in ("bf16", "bf16-pure"):
            return f"communication_dtype: found bf16 with precision {cell.precision}. Allowed: fp32."
        uses_buckets = options.reduce_bucket_size is not None or options.overlap_comm
        if stage == 1 and cell.precision == "bf16" and uses_buckets and options.offload_optimizer == "none":
            return (
                "for stage 1 in bf16 with gradients added up in fp32, DeepSpeed uses its BF16_Optimizer, which ignores "
                "reduce_bucket_size and overlap_comm. Allowed: leave both out, or zero2."
            )
        if stage == 0 and cell.precision in CAST and cell.gradient_accumulation_steps > 1:
            return (
                f"with precision {cell.precision}, zero0 adds the gradients of several micro-batches in 16 bits; every other "
                "strategy adds them in fp32. Allowed: gradient_accumulation_steps of 1, or zero1 to zero3."
            )
        stage_3_options = Zero3Options(cell.options)
        return _refuse_zeropp(cell, stage_3_options) or _refuse_offload(cell, stage_3_options)

    return refuse


def _refuse_zeropp(cell: Cell, options: Zero3Options) -> str | None:
    if cell.gpus % (size := options.hpz_partition_size):
        return f"hpz_partition_size: found {size} on {cell.gpus} ranks. Allowed: a divisor of {cell.gpus}; 1: no second copy."
    if options.quantized_gradients and cell.nnodes == 1:
        return "quantized_gradients: DeepSpeed quantises gradients only between nodes: found nnodes: 1. Allowed: false."
    if cell.launcher == "fork" and (names := name_quantizing_options(cell)):
        return f"{names}: DeepSpeed's quantiser needs a GPU, and the launcher fork runs ranks on the CPU. Allowed: false."
    return None


def name_quantizing_options(cell: Cell) -> str:
    """The names of the options of a cell that are on and quantise messages, joined by `and`; an empty string if none is on."""
    return " and ".join(name for name in ("quantized_weights", "quantized_gradients") if cell.options.get(name) is True)


def explain_unprovable(cell: Cell) -> str | None:
    """Why a cell is not compared with one process, as a sentence, or None. The quantisers of ZeRO++ round the values of a
    group to 255 or 15 levels, so the values differ too much from those of one process."""
    if names := name_quantizing_options(cell):
        return f"{names}: ZeRO++ rounds what it sends to integers of 8 or 4 bits, which no tolerance of a precision covers"
    return None


def _refuse_offload(cell: Cell, options: Zero3Options) -> str | None:
    path = options.nvme_path
    if "nvme" not in (options.offload_optimizer, options.offload_param):
        return None if path is None else "nvme_path: nothing is offloaded to nvme. Allowed: leave it out, or offload to nvme."
    if path is None or not path.startswith("/"):
        return f"nvme_path: found {path or 'null'}. Allowed: an absolute path on each node, which offloading to nvme needs."
    if cell.instruments.checkpoints is not None:
        return "instruments.checkpoints: what is offloaded to nvme cannot be saved. Allowed: leave it out, or offload to cpu."
    if cell.launcher == "fork":
        return "offloading to nvme needs a GPU, and the launcher fork runs ranks on the CPU. Allowed: cpu."
    return None


BUCKET_OPTIONS = ZeroOptions.list_options()
# DeepSpeed has no overlap for stage 1 in bf16, so it is the default only for the other stages.
OVERLAPPED = tuple(option.replace_default(True) if option.name == "overlap_comm" else option for option in BUCKET_OPTIONS)
ALL_CUT = Zero3Options.list_options()
NO_PURE = "without ZeRO, DeepSpeed keeps an fp32 copy of the bf16 weights"
CUTS = ("", "parameter", "gradient", "optimizer_state")  # ZeRO stage n shards the last n entries of this tuple
SUPPORTED_SWITCHES = ("activation_checkpointing", "max_grad_norm")


def _make_strategy(stage: int, summary: str, options: tuple[Option, ...]) -> Strategy:
    return Strategy(
        name=f"zero{stage}",
        summary=summary,
        precisions=SHARDED if stage else MIXED,
        reasons=REASONS if stage else {**REASONS, "bf16-pure": NO_PURE},
        refuse=make_refuse(stage),
        engine="trainers.engines.zero",
        settings={"stage": stage},
        options=options,
        switches=SUPPORTED_SWITCHES,
        sync=lambda _: EVERY_PASS if stage >= 2 else LAST_PASS,
        cuts=CUTS[4 - stage :],
        theory_of_memory=partial(divide_zero, stage=stage),
        theory_of_communication=partial(list_zero_terms, stage=stage),
        unprovable=explain_unprovable,
    )


VARIANTS = (
    _make_strategy(
        0, "a whole model on every rank, run by DeepSpeed without ZeRO: the reference for its stages", BUCKET_OPTIONS[:1]
    ),
    _make_strategy(1, "optimizer state sharded over the ranks (DeepSpeed ZeRO stage 1)", BUCKET_OPTIONS),
    _make_strategy(2, "optimizer state and gradients sharded over the ranks (DeepSpeed ZeRO stage 2)", OVERLAPPED),
    _make_strategy(3, "optimizer state, gradients and parameters sharded over the ranks (DeepSpeed ZeRO stage 3)", ALL_CUT),
)
