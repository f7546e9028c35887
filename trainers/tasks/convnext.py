"""Builds the ConvNeXt networks of torchvision, and their tasks."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import nn
from torchvision.models import convnext_large
from torchvision.models.convnext import CNBlock, CNBlockConfig, ConvNeXt

from shardlab.matrix.cell import Cell
from trainers.tasks.convolutional import ConvolutionalTask, modules_of_type

STOCHASTIC_DEPTH = 0.5


def original_network(classes: int, dropout: bool) -> nn.Module:
    return cast("nn.Module", convnext_large(num_classes=classes, stochastic_depth_prob=STOCHASTIC_DEPTH if dropout else 0.0))


def small_network(classes: int, dropout: bool) -> nn.Module:
    widths = (16, 32, 64, 96, None)
    settings = [CNBlockConfig(widths[stage], widths[stage + 1], 2 if stage == 2 else 1) for stage in range(4)]
    return cast(
        "nn.Module",
        ConvNeXt(settings, stochastic_depth_prob=STOCHASTIC_DEPTH if dropout else 0.0, num_classes=classes),
    )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    return modules_of_type(CNBlock, model)


def build(cell: Cell, data_path: Path, *, classes: int, tiny: bool = False) -> ConvolutionalTask:
    architecture = small_network if tiny else original_network
    return ConvolutionalTask(cell, data_path, classes=classes, architecture=architecture, blocks=find_blocks)
