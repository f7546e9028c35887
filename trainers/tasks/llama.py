"""The task of LLaMA, a language model that predicts the next token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardlab.matrix.cell import Cell
from trainers.plans.llama import LlamaPlan
from trainers.plans.plan import ModelPlan
from trainers.tasks import causal_attention
from trainers.tasks.token_task import TokenTask
from trainers.workload_options import read_shape
from trainers.workloads.llama import compute_inner_width, count_flops_per_token, count_parameters


class LlamaTask(TokenTask):
    def __init__(self, cell: Cell, data_path: Path, *, vocabulary: int) -> None:
        self._shape = read_shape(cell)
        super().__init__(cell, data_path, vocabulary)

    def model(self) -> nn.Module:
        return cast("nn.Module", LlamaForCausalLM(LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self._shape.width,
            intermediate_size=compute_inner_width(self._shape.width),
            num_hidden_layers=self._shape.layer_count,
            num_attention_heads=self._shape.head_count,
            num_key_value_heads=self._shape.head_count,
            max_position_embeddings=self.seq_len,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation=causal_attention.register_causal_attention(),
            bos_token_id=0,
            eos_token_id=0,
        )))  # fmt: skip

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(cast("Any", model).model.layers)

    def plan(self) -> ModelPlan:
        return LlamaPlan(self.seq_len, self._shape.width)

    def flops_per_unit(self) -> float:
        return count_flops_per_token(count_parameters(self._shape, self.vocabulary), self._shape, self.vocabulary, self.seq_len)


build = LlamaTask
