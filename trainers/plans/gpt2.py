"""The plan for transformers' GPT-2. Its linear layers are stored transposed (Conv1D), and one layer computes q, k and v."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainers.plans.plan import POSITIONS, ModelPlan, slice_stage_blocks

TRANSPOSED_WEIGHTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
FUSED_PARAMETERS = ("attn.c_attn.weight", "attn.c_attn.bias")


class Gpt2Plan(ModelPlan):
    vocabulary_layers = ("transformer.wte", "lm_head")
    backward_reductions = 2  # for the gradients of the inputs of the two layers c_attn and c_fc

    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        gpt2_block = cast("Any", block)
        _, width = self.hidden_shape
        # ColwiseParallel supports only nn.Linear and not Conv1D of transformers. The rows of q|k|v are reordered, so that each
        # of the equal slices contains whole heads of q, of k and of v.
        gpt2_block.attn.c_attn = _to_linear(gpt2_block.attn.c_attn, order_fused_rows(width, mesh.size()))
        gpt2_block.attn.split_size = width // mesh.size()
        gpt2_block.attn.c_proj = _to_linear(gpt2_block.attn.c_proj)
        gpt2_block.mlp.c_fc, gpt2_block.mlp.c_proj = _to_linear(gpt2_block.mlp.c_fc), _to_linear(gpt2_block.mlp.c_proj)
        hidden_layout = Shard(POSITIONS) if sequence else Replicate()
        styles = {
            "attn.c_attn": ColwiseParallel(input_layouts=hidden_layout),
            "attn.c_proj": RowwiseParallel(output_layouts=hidden_layout),
            "mlp.c_fc": ColwiseParallel(input_layouts=hidden_layout),
            "mlp.c_proj": RowwiseParallel(output_layouts=hidden_layout),
        }
        parallelize_module(block, mesh, styles, src_data_rank=None)  # None: weights are not broadcast, because they are equal
        return [*gpt2_block.ln_1.parameters(), *gpt2_block.ln_2.parameters()] if sequence else []

    def restore_parameter(self, name: str, parameter: torch.Tensor, ranks: int) -> torch.Tensor:
        if name.endswith(FUSED_PARAMETERS):
            parameter = parameter[torch.argsort(order_fused_rows(self.hidden_shape[1], ranks)).to(parameter.device)]
        return parameter.t() if name.endswith(TRANSPOSED_WEIGHTS) else parameter

    def build_stage(self, model: nn.Module, index: int, stage_count: int) -> nn.Module:
        return Gpt2Stage(model, index, stage_count)


class Gpt2Stage(nn.Module):
    """A pipeline stage of GPT-2. The first stage gets token ids (items, positions), each other stage a hidden state. The last
    stage returns logits (items, positions, vocabulary), each other stage a hidden state."""

    def __init__(self, model: nn.Module, index: int, stage_count: int) -> None:
        super().__init__()
        full_model = cast("Any", model)
        # Without a mask, attention is causal in every implementation except `eager`.
        assert full_model.config._attn_implementation != "eager", "a stage gives its blocks no mask"
        bare_model = full_model.transformer
        is_first, is_last = index == 0, index == stage_count - 1
        self.wte: nn.Module | None = bare_model.wte if is_first else None
        self.wpe: nn.Module | None = bare_model.wpe if is_first else None
        self.h = nn.ModuleList(bare_model.h[slice_stage_blocks(len(bare_model.h), index, stage_count)])
        self.ln_f: nn.Module | None = bare_model.ln_f if is_last else None
        self.lm_head: nn.Module | None = full_model.lm_head if is_last else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        if self.wte is not None and self.wpe is not None:
            hidden = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.h:
            hidden = block(hidden)
        if self.ln_f is not None and self.lm_head is not None:
            hidden = self.lm_head(self.ln_f(hidden))
        return hidden


def order_fused_rows(width: int, ranks: int) -> torch.Tensor:
    """The indices (3 * width,) that reorder the rows of q|k|v to q0|k0|v0|q1|k1|v1|..., so that rank 0 gets q0|k0|v0."""
    return torch.arange(3 * width).reshape(3, ranks, width // ranks).transpose(0, 1).flatten()


def _to_linear(conv1d: nn.Module, row_order: torch.Tensor | None = None) -> nn.Linear:
    """An nn.Linear that computes the same as a Conv1D of transformers. row_order: the order of its outputs; None: unchanged."""
    weight, bias = cast("torch.Tensor", conv1d.weight).detach().t(), cast("torch.Tensor", conv1d.bias).detach()
    if row_order is not None:
        weight, bias = weight[row_order.to(weight.device)], bias[row_order.to(bias.device)]
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.clone())
    return linear
