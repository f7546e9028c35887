"""The task of a Vision Transformer that classifies images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from shardlab.matrix.cell import Cell
from trainers.plans.plan import ModelPlan
from trainers.plans.vit import VitPlan
from trainers.task import Batch
from trainers.tasks.image_task import ImageTask
from trainers.workload_options import read_shape
from trainers.workloads.vit import CHANNELS, DROPOUT, count_flops_per_image


class VitTask(ImageTask):
    """The task of a Vision Transformer. patch: width and height of a patch in pixels; each patch is one position."""

    def __init__(self, cell: Cell, data_path: Path, *, classes: int, patch: int) -> None:
        self._shape, self._patch = read_shape(cell), patch
        super().__init__(cell, data_path, classes)

    def model(self) -> nn.Module:
        return cast("nn.Module", ViTForImageClassification(ViTConfig(
            image_size=self.image_size,
            patch_size=self._patch,
            num_channels=CHANNELS,
            num_labels=self.classes,
            hidden_size=self._shape.width,
            intermediate_size=4 * self._shape.width,
            num_hidden_layers=self._shape.layer_count,
            num_attention_heads=self._shape.head_count,
            hidden_dropout_prob=DROPOUT if self.dropout else 0.0,
            attention_probs_dropout_prob=0.0,
        )))  # fmt: skip

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(cast("Any", model).vit.layers)

    def plan(self) -> ModelPlan:
        return VitPlan((self.image_size // self._patch) ** 2 + 1, self._shape.width)  # + 1 for the class token

    def flops_per_unit(self) -> float:
        return count_flops_per_image(self._shape, self.image_size, self._patch, self.classes)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", model(pixel_values=batch.inputs).logits)


build = VitTask
