"""The plan for transformers' LLaMA. Its blocks get the rotary position embeddings as an argument."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from trainers.plans.plan import POSITIONS, ModelPlan, stage_slice

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


class LlamaPlan(ModelPlan):
    vocabulary_layers = ("model.embed_tokens", "lm_head")
    backward_reductions = len(COLUMNS)

    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        layout = Shard(POSITIONS) if sequence else Replicate()
        styles: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        styles |= {name: RowwiseParallel(output_layouts=layout) for name in ROWS}
        if sequence:
            # The hidden state is gathered once for all layers that read it, and not by each of these layers.
            styles["mlp"] = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
            styles["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": layout}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            )
        parallelize_module(block, mesh, styles, src_data_rank=None)  # None: weights are not broadcast, because they are equal
        layer = cast("Any", block)
        return [layer.input_layernorm.weight, layer.post_attention_layernorm.weight] if sequence else []

    def stage(self, model: nn.Module, index: int, count: int) -> nn.Module:
        return LlamaStage(model, index, count)


class LlamaStage(nn.Module):
    """A pipeline stage of LLaMA. The first stage gets token ids (items, positions), each other stage a hidden state. The last
    stage returns logits (items, positions, vocabulary), each other stage a hidden state."""

    def __init__(self, model: nn.Module, index: int, count: int) -> None:
        super().__init__()
        full_model = cast("Any", model)
        # Without a mask, attention is causal in every implementation except `eager`.
        assert full_model.config._attn_implementation != "eager", "a stage gives its blocks no mask"
        body = full_model.model
        first, last = index == 0, index == count - 1
        self.embed_tokens: nn.Module | None = body.embed_tokens if first else None
        self.rotary_emb = body.rotary_emb  # without parameters: each stage computes the position embeddings itself
        self.layers = nn.ModuleList(body.layers[stage_slice(len(body.layers), index, count)])
        self.norm: nn.Module | None = body.norm if last else None
        self.lm_head: nn.Module | None = full_model.lm_head if last else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(inputs) if self.embed_tokens is not None else inputs
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotation = self.rotary_emb(hidden, position_ids=positions)
        for block in self.layers:
            hidden = block(hidden, position_embeddings=rotation)
        if self.norm is not None and self.lm_head is not None:
            hidden = self.lm_head(self.norm(hidden))
        return hidden
