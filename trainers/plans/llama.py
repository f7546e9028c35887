"""The plan for transformers' LLaMA. Its blocks get the rotary position embeddings as an argument."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from trainers.plans.derived import DerivedPlan, LayerSplit
from trainers.plans.plan import slice_stage_blocks

COLUMN_SPLIT_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW_SPLIT_LAYERS = ("self_attn.o_proj", "mlp.down_proj")


SPLIT = LayerSplit(COLUMN_SPLIT_LAYERS, ROW_SPLIT_LAYERS, degrees=(), vocabulary_layers=("model.embed_tokens", "lm_head"))


class LlamaPlan(DerivedPlan):
    """The split that transformers has for LLaMA, written down, so that no model has to be built to know it."""

    backward_reductions = len(COLUMN_SPLIT_LAYERS)

    def __init__(self, positions: int, width: int) -> None:
        super().__init__(positions, width, SPLIT)

    def build_stage(self, model: nn.Module, index: int, stage_count: int) -> nn.Module:
        return LlamaStage(model, index, stage_count)


class LlamaStage(nn.Module):
    """A pipeline stage of LLaMA. The first stage gets token ids (items, positions), each other stage a hidden state. The last
    stage returns logits (items, positions, vocabulary), each other stage a hidden state."""

    def __init__(self, model: nn.Module, index: int, stage_count: int) -> None:
        super().__init__()
        full_model = cast("Any", model)
        # Without a mask, attention is causal in every implementation except `eager`.
        assert full_model.config._attn_implementation != "eager", "a stage gives its blocks no mask"
        bare_model = full_model.model
        is_first, is_last = index == 0, index == stage_count - 1
        self.embed_tokens: nn.Module | None = bare_model.embed_tokens if is_first else None
        self.rotary_emb = bare_model.rotary_emb  # without parameters: each stage computes the position embeddings itself
        self.layers = nn.ModuleList(bare_model.layers[slice_stage_blocks(len(bare_model.layers), index, stage_count)])
        self.norm: nn.Module | None = bare_model.norm if is_last else None
        self.lm_head: nn.Module | None = full_model.lm_head if is_last else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(inputs) if self.embed_tokens is not None else inputs
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotation = self.rotary_emb(hidden, position_ids=positions)
        for block in self.layers:
            hidden = block(hidden, position_embeddings=rotation)
        if self.norm is not None and self.lm_head is not None:
            hidden = self.lm_head(self.norm(hidden))
        return hidden
