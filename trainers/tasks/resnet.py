"""Builds the ResNet networks of torchvision, and their tasks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

from torch import nn
from torchvision import models
from torchvision.models.resnet import Bottleneck, ResNet

from shardlab.matrix.cell import Cell
from trainers.tasks.convolutional import ConvolutionalTask, modules_of_type


def original_network(depth: int, classes: int, dropout: bool) -> nn.Module:
    return cast("nn.Module", getattr(models, f"resnet{depth}")(num_classes=classes))


def tiny_network(layers: tuple[int, int, int, int], classes: int, dropout: bool) -> nn.Module:
    """A narrow network: bottlenecks with 8 to 64 channels, whose outputs are not four times as wide.

    layers: number of bottlenecks in each stage. Of an image with 32 x 32 pixels, 2 x 2 positions are left in the last stage, so
    that BatchNorm has more than one value per channel even if a micro-batch is a single image.
    """

    class Narrow(Bottleneck):  # type: ignore[misc]
        expansion = 1

    network = ResNet(
        Narrow,
        list(layers),
        num_classes=classes,
        width_per_group=8,
        replace_stride_with_dilation=[False, False, True],
    )
    return cast("nn.Module", network)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    return modules_of_type(Bottleneck, model)


def build(
    cell: Cell, data_path: Path, *, classes: int, depth: int = 0, layers: tuple[int, int, int, int] | None = None
) -> ConvolutionalTask:
    """The task of a ResNet. depth: selects a network of torchvision, such as 50. layers: if given, a narrow network with these
    numbers of bottlenecks per stage is built instead."""
    architecture = partial(original_network, depth) if layers is None else partial(tiny_network, layers)
    return ConvolutionalTask(cell, data_path, classes=classes, architecture=architecture, blocks=find_blocks)
