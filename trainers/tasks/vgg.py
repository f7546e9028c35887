"""Builds the VGG networks of torchvision, and their tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchvision.models.vgg import VGG, cfgs, make_layers

from shardlab.matrix.cell import Cell
from trainers.tasks.convolutional import ConvolutionalTask

DROPOUT = 0.5
NARROW = (4, 4, "M", 8, 8, "M", 16, 16, 16, "M", 32, 32, 32, "M", 32, 32, 32, "M")
NARROW_LINEAR = 64


def original_network(classes: int, dropout: bool) -> nn.Module:
    return cast("nn.Module", VGG(group_stages(cfgs["D"]), num_classes=classes, dropout=DROPOUT if dropout else 0.0))


def narrow_network(classes: int, dropout: bool) -> nn.Module:
    """A VGG with 13 convolutions, which have a sixteenth of the usual channels, and with narrow linear layers."""
    features = group_stages(NARROW)
    with torch.device("meta"):  # on the meta device, because the linear layers of torchvision are 4,096 wide and replaced below
        network = VGG(features, num_classes=classes, dropout=DROPOUT if dropout else 0.0)
    device = next(features.parameters()).device
    for index, (inputs, outputs) in {
        0: (32 * 7 * 7, NARROW_LINEAR), 3: (NARROW_LINEAR, NARROW_LINEAR), 6: (NARROW_LINEAR, classes)
    }.items():  # fmt: skip
        network.classifier[index] = nn.Linear(inputs, outputs, device=device)
    return cast("nn.Module", network)


def group_stages(channels: Any) -> nn.Sequential:
    """The layers of torchvision, grouped into one module per stage: all layers up to and including the next pooling.

    channels: channels of the convolutions, and `M` for a pooling.
    """
    stage_layers: list[list[nn.Module]] = [[]]
    for layer in make_layers(list(channels)):
        stage_layers[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            stage_layers.append([])
    return nn.Sequential(*(nn.Sequential(*layers) for layers in stage_layers if layers))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks: each stage, and all linear layers together as one block. In VGG-16, the linear layers have 124 of the 138
    million parameters."""
    network = cast("Any", model)
    return [*network.features, network.classifier]


def build(cell: Cell, data_path: Path, *, classes: int, tiny: bool = False) -> ConvolutionalTask:
    architecture = narrow_network if tiny else original_network
    return ConvolutionalTask(cell, data_path, classes=classes, architecture=architecture, blocks=find_blocks)
