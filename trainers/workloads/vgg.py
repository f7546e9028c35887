"""Image classification with torchvision's VGG, from random weights. Most of its weights are in three linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Optimizer
from trainers.tasks.convolutional import variant
from trainers.tasks.image_task import IMAGENET_CLASSES

if TYPE_CHECKING:
    from torch import nn

OPTIMIZER = Optimizer(name="sgd", lr=0.01)  # Simonyan and Zisserman, 2015, section 3.1, at 256 images
TWINS_OPTIMIZER = Optimizer(name="adamw", lr=2e-3)  # with the original's, nothing is learned in a short run
DROPOUT = 0.5
NARROW = (4, 4, "M", 8, 8, "M", 16, 16, 16, "M", 32, 32, 32, "M", 32, 32, 32, "M")
NARROW_LINEAR = 64


def original(classes: int, dropout: bool) -> nn.Module:
    from torchvision.models.vgg import VGG, cfgs

    return cast("nn.Module", VGG(stages(cfgs["D"]), num_classes=classes, dropout=DROPOUT if dropout else 0.0))


def tiny(classes: int, dropout: bool) -> nn.Module:
    """The 13 convolutions with a sixteenth of the channels, and linear layers that fit them."""
    import torch
    from torch import nn
    from torchvision.models.vgg import VGG

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
    from torch import nn
    from torchvision.models.vgg import make_layers

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


VARIANTS = (
    variant(
        "vgg16-tiny",
        "VGG of 13 convolutions with 4 to 32 channels, the twin of vgg16",
        parameters=163_054,
        flops_per_unit=8_371_968.0,
        image_size=32,
        classes=10,
        architecture=tiny,
        blocks=blocks,
        optimizer=TWINS_OPTIMIZER,
        dropout="0.5 between the linear layers",
    ),
    variant(
        "vgg16",
        "VGG-16 (Simonyan and Zisserman, 2015, configuration D)",
        parameters=138_357_544,
        flops_per_unit=92_648_177_664.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        architecture=original,
        blocks=blocks,
        optimizer=OPTIMIZER,
        dropout="0.5 between the linear layers",
    ),
)
