"""The plan of transformers' LLaMA. Its blocks get the rotation of the positions as an argument, not from a table."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from trainers.plans.plan import POSITIONS, ModelPlan, share

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


class LlamaPlan(ModelPlan):
    backward_reductions = len(COLUMNS)

    def __init__(self, positions: int, width: int) -> None:
        self.hidden = (positions, width)

    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        between = Shard(POSITIONS) if sequence else Replicate()
        styles: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        styles |= {name: RowwiseParallel(output_layouts=between) for name in ROWS}
        if sequence:
            # Gathered once for the layers that read it, and not by each of them.
            styles["mlp"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
            styles["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            )
        parallelize_module(block, mesh, styles, src_data_rank=None)  # nothing to send: all ranks drew the same weights
        layer = cast("Any", block)
        return [layer.input_layernorm.weight, layer.post_attention_layernorm.weight] if sequence else []

    def restored(self, name: str, parameter: torch.Tensor, ranks: int) -> torch.Tensor:
        return parameter

    def stage(self, model: nn.Module, index: int, count: int) -> nn.Module:
        return LlamaStage(model, index, count)


class LlamaStage(nn.Module):
    """Token ids (items, positions) or a hidden state in; a hidden state or logits (items, positions, vocabulary) out."""

    def __init__(self, model: nn.Module, index: int, count: int) -> None:
        super().__init__()
        whole = cast("Any", model)
        # Without a mask, attention is causal in every implementation except `eager`.
        assert whole.config._attn_implementation != "eager", "a stage gives its blocks no mask"
        body = whole.model
        first, last = index == 0, index == count - 1
        self.embed_tokens: nn.Module | None = body.embed_tokens if first else None
        self.rotary_emb = body.rotary_emb  # without parameters: each stage turns by the positions itself
        self.layers = nn.ModuleList(body.layers[share(len(body.layers), index, count)])
        self.norm: nn.Module | None = body.norm if last else None
        self.lm_head: nn.Module | None = whole.lm_head if last else None

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(entering) if self.embed_tokens is not None else entering
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotation = self.rotary_emb(hidden, position_ids=positions)
        for block in self.layers:
            hidden = block(hidden, position_embeddings=rotation)
        if self.norm is not None and self.lm_head is not None:
            hidden = self.lm_head(self.norm(hidden))
        return hidden
