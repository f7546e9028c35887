"""Workloads: predicting the next token with LLaMA of the transformers library, from random weights."""

from __future__ import annotations

from shardlab.matrix.cell import Cell, Optimizer
from trainers.workload import Workload
from trainers.workload_options import Shape, list_token_options, read_shape, refuse_shape, refuse_tokens

VOCABULARY = 32_000
FLOPS_SOURCE = (
    "per token 6*(N - V*d) + 12*L*d*T (Chowdhery et al., PaLM, 2022, appendix B, without the embedding of V tokens, which "
    "needs no multiplications and is not tied to the head): N parameters, L layers, width d, sequence length T"
)


def compute_inner_width(width: int) -> int:
    """The width of the MLP: 43/16 of the model's width; 11,008 for 4096 (LLaMA 7B), 5,504 for 2048 (Sheared-LLaMA 1.3B)."""
    return width * 43 // 16


def count_parameters(shape: Shape, vocabulary: int) -> int:
    """The number of trainable parameters: the embedding and the head; for each block of width d with an MLP of width i, 4 d^2
    in attention, 3 d i in the MLP and two norms; and the last norm."""
    width = shape.width
    block_parameters = 4 * width**2 + 3 * width * compute_inner_width(width) + 2 * width
    return 2 * vocabulary * width + shape.layer_count * block_parameters + width


def count_flops_per_token(parameter_count: int, shape: Shape, vocabulary: int, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token, by FLOPS_SOURCE; a multiply-add counts as 2."""
    return 6.0 * (parameter_count - vocabulary * shape.width) + 12.0 * shape.layer_count * shape.width * seq_len


def refuse(cell: Cell) -> str | None:
    if (why := refuse_shape(cell) or refuse_tokens(cell)) is not None:
        return why
    shape = read_shape(cell)
    if shape.width // shape.head_count % 2:
        return f"n_embd: {shape.width} / n_head {shape.head_count} gives an odd head width. Allowed: an even head width."
    if (inner := compute_inner_width(shape.width)) % cell.tp:
        return f"tp: {cell.tp} does not divide the MLP's width, {inner} (43/16 of n_embd). Allowed: a divisor of {inner}."
    return None


def _make_workload(
    name: str, summary: str, parameter_count: int, shape: Shape, vocabulary: int, seq_len: int, lr: float, **proof_options: int
) -> Workload:
    return Workload(
        name=name,
        summary=summary,
        parameters=parameter_count,
        unit="tokens",
        flops_per_unit=count_flops_per_token(parameter_count, shape, vocabulary, seq_len),
        flops_source=FLOPS_SOURCE,
        optimizer=Optimizer(name="adamw", lr=lr),
        task="trainers.tasks.llama",
        settings={"vocabulary": vocabulary},
        refuse=refuse,
        seq_len=seq_len,
        options=(*shape.list_options(), *list_token_options("synthetic")),
        heads="n_head",
        blocks="n_layer",
        proof_options=proof_options,
    )


VARIANTS = (
    _make_workload("llm-1.3b-tiny", "LLaMA of 4 layers and width 64 with 512 tokens, the twin of llm-1.3b",
              263_744, Shape(4, 64, 4), 512, 64, 1e-3),
    _make_workload("llm-7b-tiny", "LLaMA of 6 layers and width 64 with 512 tokens, the twin of llm-7b",
              362_816, Shape(6, 64, 4), 512, 64, 1e-3),
    _make_workload("llm-1.3b", "LLaMA of 24 layers and width 2048, the shape of Sheared-LLaMA-1.3B (Xia et al., 2023)",
              1_345_423_360, Shape(24, 2048, 16), VOCABULARY, 2048, 3e-4, n_layer=2),
    _make_workload("llm-7b", "LLaMA of 32 layers and width 4096, the 7B of Touvron et al., 2023, table 2",
              6_738_415_616, Shape(32, 4096, 32), VOCABULARY, 2048, 3e-4, n_layer=2),
)  # fmt: skip
