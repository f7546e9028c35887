"""The plan for transformers' Vision Transformer, in which q, k and v are separate layers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainers.plans.plan import ModelPlan, slice_stage_blocks


class VitPlan(ModelPlan):
    backward_reductions = 4  # for the gradients of the inputs of the four layers q_proj, k_proj, v_proj and fc1

    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        assert not sequence, "refused at plan time: the menu gives images no positions"
        styles = {
            "attention.q_proj": ColwiseParallel(),
            "attention.k_proj": ColwiseParallel(),
            "attention.v_proj": ColwiseParallel(),
            "attention.o_proj": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, styles, src_data_rank=None)  # None: weights are not broadcast, because they are equal
        return []

    def build_stage(self, model: nn.Module, index: int, stage_count: int) -> nn.Module:
        return VitStage(model, index, stage_count)


class VitStage(nn.Module):
    """A pipeline stage of a Vision Transformer. The first stage gets images (items, colours, height, width), each other
    stage a hidden state. The last stage returns logits (items, classes), each other stage a hidden state."""

    def __init__(self, model: nn.Module, index: int, stage_count: int) -> None:
        super().__init__()
        full_model = cast("Any", model)
        bare_model, is_last = full_model.vit, index == stage_count - 1
        self.embeddings: nn.Module | None = bare_model.embeddings if index == 0 else None
        self.layers = nn.ModuleList(bare_model.layers[slice_stage_blocks(len(bare_model.layers), index, stage_count)])
        self.layernorm: nn.Module | None = bare_model.layernorm if is_last else None
        self.classifier: nn.Module | None = full_model.classifier if is_last else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embeddings(inputs) if self.embeddings is not None else inputs
        for block in self.layers:
            hidden = block(hidden)
        if self.layernorm is not None and self.classifier is not None:
            hidden = self.classifier(self.layernorm(hidden)[:, 0])  # position 0 is that of the class token
        return hidden
