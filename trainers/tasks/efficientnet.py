"""Builds the EfficientNetV2 networks of torchvision, and their tasks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

from torch import nn
from torchvision.models import efficientnet_v2_l
from torchvision.models.efficientnet import EfficientNet, FusedMBConv, FusedMBConvConfig, MBConv, MBConvConfig

from shardlab.matrix.cell import Cell
from trainers.tasks.convolutional import ConvolutionalTask

DROPOUT, STOCHASTIC_DEPTH = 0.4, 0.2


def original_network(classes: int, dropout: bool) -> nn.Module:
    return cast(
        "nn.Module",
        efficientnet_v2_l(
            num_classes=classes,
            dropout=DROPOUT if dropout else 0.0,
            stochastic_depth_prob=STOCHASTIC_DEPTH if dropout else 0.0,
        ),
    )


def small_network(classes: int, dropout: bool) -> nn.Module:
    """A small network with both kinds of blocks, with and without halving of the image. 32 x 32 pixels end as 2 x 2."""
    settings = [
        FusedMBConvConfig(1, 3, 1, 16, 16, 1),
        FusedMBConvConfig(4, 3, 2, 16, 24, 1),
        MBConvConfig(4, 3, 2, 24, 32, 2),
        MBConvConfig(6, 3, 2, 32, 48, 2),
    ]
    network = EfficientNet(
        settings,
        dropout=DROPOUT if dropout else 0.0,
        stochastic_depth_prob=STOCHASTIC_DEPTH if dropout else 0.0,
        num_classes=classes,
        norm_layer=partial(nn.BatchNorm2d, eps=1e-3),
        last_channel=128,
    )
    return cast("nn.Module", network)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (FusedMBConv, MBConv))]


def build(cell: Cell, data_path: Path, *, classes: int, tiny: bool = False) -> ConvolutionalTask:
    architecture = small_network if tiny else original_network
    return ConvolutionalTask(cell, data_path, classes=classes, architecture=architecture, blocks=find_blocks)
