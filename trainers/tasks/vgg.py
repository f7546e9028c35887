"""Builds the VGG networks of torchvision, and their tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchvision.models.vgg import VGG, cfgs, make_layers

from shardlab.cell import Cell
from trainers.tasks.convolutional import ConvolutionalTask

DROPOUT = 0.5
NARROW = (4, 4, "M", 8, 8, "M", 16, 16, 16, "M", 32, 32, 32, "M", 32, 32, 32, "M")
NARROW_LINEAR = 64


def original(classes: int, dropout: bool) -> nn.Module:
    return cast("nn.Module", VGG(stages(cfgs["D"]), num_classes=classes, dropout=DROPOUT if dropout else 0.0))


def narrow(classes: int, dropout: bool) -> nn.Module:
    """The 13 convolutions with a sixteenth of the channels, and linear layers that fit them."""
    features = stages(NARROW)
    with torch.device("meta"):  # the library's own linear layers are 4,096 wide behind whatever convolutions
        network = VGG(features, num_classes=classes, dropout=DROPOUT if dropout else 0.0)
    device = next(features.parameters()).device
    for index, (inputs, outputs) in {
        0: (32 * 7 * 7, NARROW_LINEAR), 3: (NARROW_LINEAR, NARROW_LINEAR), 6: (NARROW_LINEAR, classes)
    }.items():  # fmt: skip
        network.classifier[index] = nn.Linear(inputs, outputs, device=device)
    return cast("nn.Module", network)


def stages(configuration: Any) -> nn.Sequential:
    """The library's layers, grouped into one module per stage: the convolutions up to and including the next pooling."""
    found: list[list[nn.Module]] = [[]]
    for layer in make_layers(list(configuration)):
        found[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            found.append([])
    return nn.Sequential(*(nn.Sequential(*layers) for layers in found if layers))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The stages, and the linear layers as one more: they hold 124 of the 138 million parameters."""
    network = cast("Any", model)
    return [*network.features, network.classifier]


def build(cell: Cell, data_path: Path, *, classes: int, tiny: bool = False) -> ConvolutionalTask:
    architecture = narrow if tiny else original
    return ConvolutionalTask(cell, data_path, classes=classes, architecture=architecture, blocks=blocks)
