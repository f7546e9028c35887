"""Image classification with torchvision's DenseNet, from random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shardlab.cell import Optimizer
from trainers.tasks.convolutional import of_type, variant
from trainers.tasks.image_task import IMAGENET_CLASSES

if TYPE_CHECKING:
    from torch import nn

OPTIMIZER = Optimizer(name="sgd", lr=0.1)  # Huang et al., 2017, section 4.2, at 256 images


def original(classes: int, dropout: bool) -> nn.Module:
    from torchvision.models import densenet121

    return cast("nn.Module", densenet121(num_classes=classes))


def tiny(classes: int, dropout: bool) -> nn.Module:
    """Three dense blocks: behind a fourth, 32 x 32 pixels would leave BatchNorm one position."""
    from torchvision.models import DenseNet

    return cast("nn.Module", DenseNet(growth_rate=12, block_config=(2, 3, 3), num_init_features=24, num_classes=classes))


def blocks(model: nn.Module) -> list[nn.Module]:
    from torchvision.models.densenet import _DenseBlock

    return of_type(_DenseBlock, model)


VARIANTS = (
    variant(
        "densenet121-tiny",
        "DenseNet of 3 dense blocks with 8 layers that grow by 12, the twin of densenet121",
        parameters=64_486,
        flops_per_unit=11_828_088.0,
        image_size=32,
        classes=10,
        architecture=tiny,
        blocks=blocks,
        optimizer=OPTIMIZER,
    ),
    variant(
        "densenet121",
        "DenseNet-121 (Huang et al., 2017), 4 dense blocks",
        parameters=7_978_856,
        flops_per_unit=16_768_942_080.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        architecture=original,
        blocks=blocks,
        optimizer=OPTIMIZER,
        smallest_alone=64,
    ),
)
