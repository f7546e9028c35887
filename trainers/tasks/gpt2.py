"""The task of GPT-2, a language model that predicts the next token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from shardlab.matrix.cell import Cell
from trainers.plans.gpt2 import Gpt2Plan
from trainers.plans.plan import ModelPlan
from trainers.tasks import causal_attention
from trainers.tasks.token_task import TokenTask
from trainers.workload_options import read_shape
from trainers.workloads.gpt2 import DROPOUT, GELU, Gpt2Options, count_flops_per_token, count_parameters


class Gpt2Task(TokenTask):
    """The task of GPT-2. positions: number of rows of the position embedding; more if the cell's sequences are longer."""

    def __init__(self, cell: Cell, data_path: Path, *, vocabulary: int, positions: int) -> None:
        self._shape = read_shape(cell)
        super().__init__(cell, data_path, vocabulary)
        self._options = Gpt2Options(cell.options)
        row_multiple = self._options.pad_vocabulary
        self._row_count = -(-vocabulary // row_multiple) * row_multiple
        if self._row_count > vocabulary:
            self.padding, self.counted_classes = (self._row_count - vocabulary) * self._shape.width, vocabulary
        self._positions = max(positions, self.seq_len)

    def model(self) -> nn.Module:
        dropout = DROPOUT if self._options.dropout else 0.0
        return cast("nn.Module", GPT2LMHeadModel(GPT2Config(
            vocab_size=self._row_count,
            n_positions=self._positions,
            n_layer=self._shape.layer_count,
            n_embd=self._shape.width,
            n_head=self._shape.head_count,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            use_cache=False,
            activation_function=GELU[self._options.gelu],
            attn_implementation=causal_attention.register_causal_attention(),
            bos_token_id=0,
            eos_token_id=0,
        )))  # fmt: skip

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(cast("Any", model).transformer.h)

    def plan(self) -> ModelPlan:
        return Gpt2Plan(self.seq_len, self._shape.width)

    def flops_per_unit(self) -> float:
        return count_flops_per_token(count_parameters(self._shape, self.vocabulary, self._positions), self._shape, self.seq_len)


build = Gpt2Task
