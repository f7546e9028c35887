"""Builds the DenseNet networks of torchvision, and their tasks."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import nn
from torchvision.models import DenseNet, densenet121
from torchvision.models.densenet import _DenseBlock

from shardlab.matrix.cell import Cell
from trainers.tasks.convolutional import ConvolutionalTask, modules_of_type


def original_network(classes: int, dropout: bool) -> nn.Module:
    return cast("nn.Module", densenet121(num_classes=classes))


def small_network(classes: int, dropout: bool) -> nn.Module:
    """A small network with three dense blocks. With a fourth block, an image of 32 x 32 pixels would end as a single position,
    which is too few for BatchNorm."""
    return cast("nn.Module", DenseNet(growth_rate=12, block_config=(2, 3, 3), num_init_features=24, num_classes=classes))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    return modules_of_type(_DenseBlock, model)


def build(cell: Cell, data_path: Path, *, classes: int, tiny: bool = False) -> ConvolutionalTask:
    architecture = small_network if tiny else original_network
    return ConvolutionalTask(cell, data_path, classes=classes, architecture=architecture, blocks=find_blocks)
