"""Builds the convolutional networks on the menu, which are networks of torchvision and their tiny twins, and their tasks.

A twin has all kinds of layers of its network. Of an image of 32 x 32 pixels, its last BatchNorm gets 2 x 2 positions, so that
it has more than one value per channel even if a micro-batch is a single image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torchvision.models import ConvNeXt, DenseNet, EfficientNet, ResNet
from torchvision.models.convnext import CNBlock, CNBlockConfig
from torchvision.models.densenet import _DenseBlock
from torchvision.models.efficientnet import FusedMBConv, FusedMBConvConfig, MBConv, MBConvConfig
from torchvision.models.resnet import Bottleneck
from torchvision.models.vgg import VGG, make_layers

from shardlab.matrix.cell import Cell
from trainers.tasks.convolutional_task import ConvolutionalTask
from trainers.tasks.vision_classifier import build_network

VGG_TWIN = (4, 4, "M", 8, 8, "M", 16, 16, 16, "M", 32, 32, 32, "M", 32, 32, 32, "M")  # channels; M: a pooling
CONVNEXT_TWIN = (CNBlockConfig(16, 32, 1), CNBlockConfig(32, 64, 1), CNBlockConfig(64, 96, 2), CNBlockConfig(96, None, 1))
# Both kinds of blocks, with and without halving of the image.
EFFICIENTNET_TWIN = (
    FusedMBConvConfig(1, 3, 1, 16, 16, 1), FusedMBConvConfig(4, 3, 2, 16, 24, 1),
    MBConvConfig(4, 3, 2, 24, 32, 2), MBConvConfig(6, 3, 2, 32, 48, 2),
)  # fmt: skip


class NarrowBottleneck(Bottleneck):  # type: ignore[misc]
    """A bottleneck whose outputs are not four times as wide."""

    expansion = 1


def build_resnet_twin(bottlenecks: tuple[int, int, int, int], classes: int) -> nn.Module:
    """A narrow ResNet with 8 to 64 channels. bottlenecks: the number of bottlenecks in each stage."""
    dilations = [False, False, True]
    network = ResNet(NarrowBottleneck, list(bottlenecks), classes, width_per_group=8, replace_stride_with_dilation=dilations)
    return cast("nn.Module", network)


def build_densenet_twin(classes: int) -> nn.Module:
    """A DenseNet with three dense blocks. A fourth block would get a single position, which is too few for BatchNorm."""
    return cast("nn.Module", DenseNet(growth_rate=12, block_config=(2, 3, 3), num_init_features=24, num_classes=classes))


def build_efficientnet_twin(classes: int) -> nn.Module:
    norm_layer = partial(nn.BatchNorm2d, eps=1e-3)
    network = EfficientNet(EFFICIENTNET_TWIN, 0.4, num_classes=classes, norm_layer=norm_layer, last_channel=128)
    return cast("nn.Module", network)


def build_convnext_twin(classes: int) -> nn.Module:
    return cast("nn.Module", ConvNeXt(list(CONVNEXT_TWIN), stochastic_depth_prob=0.5, num_classes=classes))


def build_vgg_twin(classes: int) -> nn.Module:
    """A VGG with 13 convolutions, which have a sixteenth of the usual channels, and with narrow linear layers."""
    feature_layers = make_layers(list(VGG_TWIN))
    with torch.device("meta"):  # on the meta device, because the linear layers of torchvision are 4,096 wide and replaced below
        network = VGG(feature_layers, num_classes=classes)
    device = next(feature_layers.parameters()).device
    for index, inputs, outputs in ((0, 32 * 7 * 7, 64), (3, 64, 64), (6, 64, classes)):
        network.classifier[index] = nn.Linear(inputs, outputs, device=device)
    return cast("nn.Module", network)


class ConvolutionalNetwork(NamedTuple):
    """A network of torchvision on the menu."""

    build_twin: Callable[[int], nn.Module]
    """Builds the tiny twin with this number of classes."""
    block_types: tuple[type, ...]
    """The types of the repeated blocks; empty for a VGG, whose blocks are its stages and its linear layers."""


NETWORKS = {
    "resnet50": ConvolutionalNetwork(partial(build_resnet_twin, (1, 1, 1, 1)), (Bottleneck,)),
    "resnet101": ConvolutionalNetwork(partial(build_resnet_twin, (1, 1, 2, 1)), (Bottleneck,)),
    "densenet121": ConvolutionalNetwork(build_densenet_twin, (_DenseBlock,)),
    "vgg16": ConvolutionalNetwork(build_vgg_twin, ()),
    "efficientnet_v2_l": ConvolutionalNetwork(build_efficientnet_twin, (FusedMBConv, MBConv)),
    "convnext_large": ConvolutionalNetwork(build_convnext_twin, (CNBlock,)),
}


def group_stages(layers: Iterable[nn.Module]) -> nn.Sequential:
    """The layers of a VGG, grouped into one module per stage: all layers up to and including the next pooling."""
    stage_layers: list[list[nn.Module]] = [[]]
    for layer in layers:
        stage_layers[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            stage_layers.append([])
    return nn.Sequential(*(nn.Sequential(*layers) for layers in stage_layers if layers))


def build(cell: Cell, data_path: Path, *, network: str, twin: bool, classes: int) -> ConvolutionalTask:
    """The task of a network of torchvision. network: its name. twin: whether to build its tiny twin."""
    build_twin, block_types = NETWORKS[network]

    def build_model(classes: int) -> nn.Module:
        model = build_twin(classes) if twin else build_network(network, classes, twin=False)
        if isinstance(model, VGG):
            model.features = group_stages(model.features)
        return model

    def find_blocks(model: nn.Module) -> list[nn.Module]:
        if not block_types:  # in VGG-16, the linear layers have 124 of the 138 million parameters
            return [*cast("Any", model).features, cast("Any", model).classifier]
        return [module for module in model.modules() if isinstance(module, block_types)]

    return ConvolutionalTask(cell, data_path, classes=classes, build_model=build_model, find_blocks=find_blocks)
