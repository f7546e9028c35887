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
from trainers.workload_options import shape_of
from trainers.workloads.llama import flops_per_token, inner_width, parameters


class LlamaTask(TokenTask):
    def __init__(self, cell: Cell, data_path: Path, *, vocabulary: int) -> None:
        self._shape = shape_of(cell)
        super().__init__(cell, data_path, vocabulary)

    def model(self) -> nn.Module:
        return cast("nn.Module", LlamaForCausalLM(LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self._shape.width,
            intermediate_size=inner_width(self._shape.width),
            num_hidden_layers=self._shape.layers,
            num_attention_heads=self._shape.heads,
            num_key_value_heads=self._shape.heads,
            max_position_embeddings=self.seq_len,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation=causal_attention.register(),
            bos_token_id=0,
            eos_token_id=0,
        )))  # fmt: skip

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(cast("Any", model).model.layers)

    def plan(self) -> ModelPlan:
        return LlamaPlan(self.seq_len, self._shape.width)

    def flops_per_unit(self) -> float:
        return flops_per_token(parameters(self._shape, self.vocabulary), self._shape, self.vocabulary, self.seq_len)


build = LlamaTask
