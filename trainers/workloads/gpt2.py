"""Workloads: predicting the next token with GPT-2 of the transformers library, from random weights."""

from __future__ import annotations

from shardlab.matrix.cell import Cell, Optimizer
from shardlab.registry import TypedOptions, declare
from trainers.workload import Workload
from trainers.workload_options import Shape, list_token_options, refuse_shape, refuse_tokens

VOCABULARY = 50_257  # size of the published byte-pair encoding
# Value of the option -> name in transformers. Both names stand for the same formula, GELU with the tanh approximation
# (Hendrycks and Gimpel, 2016).
GELU = {"fused": "gelu_pytorch_tanh", "unfused": "gelu_new"}
DROPOUT = 0.1  # the rates of transformers' configuration of GPT-2
FLOPS_SOURCE = (
    "per token 6N + 12*L*d*T (Chowdhery et al., PaLM, 2022, appendix B): N parameters, L layers, width d, sequence length T"
)


class Gpt2Options(TypedOptions):
    gelu: str = declare("fused", "GELU as one operator, or as the eight operators of transformers' GPT-2", tuple(GELU))
    pad_vocabulary: int = declare(
        1, "pad the rows of the token embedding to a multiple of this (64 suits tensor cores); padding is not counted", least=1
    )
    dropout: bool | None = declare(
        None,
        f"true: {DROPOUT} behind the embedding, in attention and behind each layer of a block; null: none",
        choices=(True,),
        kind="bool",
    )


def count_parameters(shape: Shape, vocabulary: int, positions: int) -> int:
    """The number of trainable parameters: the embeddings of tokens (tied to the head) and of positions; for each block of width
    d, 12 d^2 weights and 13 d other parameters; and the last layer norm."""
    width = shape.width
    return (vocabulary + positions) * width + shape.layer_count * (12 * width**2 + 13 * width) + 2 * width


def count_flops_per_token(parameter_count: int, shape: Shape, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token, by FLOPS_SOURCE; a multiply-add counts as 2.

    6N: each weight is used in one multiply-add in forward and in two in backward. 12*L*d*T: the two matrix products of
    attention with all T positions, also once in forward and twice in backward. Positions that a causal kernel may skip are
    counted.
    """
    return 6.0 * parameter_count + 12.0 * shape.layer_count * shape.width * seq_len


def refuse(cell: Cell) -> str | None:
    return refuse_shape(cell) or refuse_tokens(cell)


def _make_workload(
    name: str, summary: str, parameter_count: int, shape: Shape, vocabulary: int, seq_len: int, data: str, lr: float
) -> Workload:
    return Workload(
        name=name,
        summary=summary,
        parameters=parameter_count,
        unit="tokens",
        flops_per_unit=count_flops_per_token(parameter_count, shape, seq_len),
        flops_source=FLOPS_SOURCE,
        optimizer=Optimizer(name="adamw", lr=lr),
        task="trainers.tasks.gpt2",
        settings={"vocabulary": vocabulary, "positions": seq_len},
        refuse=refuse,
        seq_len=seq_len,
        options=(*shape.list_options(), *Gpt2Options.list_options(), *list_token_options(data)),
        heads="n_head",
        blocks="n_layer",
    )


VARIANTS = (
    _make_workload(
        "gpt2-tiny", "GPT-2 of 4 layers and width 64 on the bytes of Python's standard library",
        220_544, Shape(4, 64, 4), 256, 64, "stdlib-text", 1e-3,
    ),
    _make_workload(
        "gpt2-large-tiny", "GPT-2 of 6 layers and width 64 with 512 tokens, the twin of gpt2-large",
        336_896, Shape(6, 64, 4), 512, 64, "synthetic", 1e-3,
    ),
    _make_workload("gpt2", "GPT-2 of 12 layers and width 768 (Radford et al., 2019)",
              124_439_808, Shape(12, 768, 12), VOCABULARY, 1024, "synthetic", 3e-4),
    _make_workload("gpt2-large", "GPT-2 of 36 layers and width 1280 (Radford et al., 2019)",
              774_030_080, Shape(36, 1280, 20), VOCABULARY, 1024, "synthetic", 3e-4),
)  # fmt: skip
