"""Image classification with torchvision's EfficientNetV2, from random weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from shardlab.cell import Optimizer
from trainers.tasks.convolutional import variant
from trainers.tasks.image_task import IMAGENET_CLASSES

if TYPE_CHECKING:
    from torch import nn

OPTIMIZER = Optimizer(name="adamw", lr=1e-3)
DROPOUT, STOCHASTIC_DEPTH = 0.4, 0.2
RATES = "0.4 before the head, and blocks are skipped with a probability that rises to 0.2"


def original(classes: int, dropout: bool) -> nn.Module:
    from torchvision.models import efficientnet_v2_l

    return cast(
        "nn.Module",
        efficientnet_v2_l(
            num_classes=classes,
            dropout=DROPOUT if dropout else 0.0,
            stochastic_depth_prob=STOCHASTIC_DEPTH if dropout else 0.0,
        ),
    )


def tiny(classes: int, dropout: bool) -> nn.Module:
    """Both kinds of block, with and without halving of the image: 32 x 32 pixels end as 2 x 2."""
    from torch import nn
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

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


def blocks(model: nn.Module) -> list[nn.Module]:
    from torchvision.models.efficientnet import FusedMBConv, MBConv

    return [module for module in model.modules() if isinstance(module, (FusedMBConv, MBConv))]


VARIANTS = (
    variant(
        "efficientnet-v2-l-tiny",
        "EfficientNetV2 of 6 blocks with 16 to 48 channels, the twin of efficientnet-v2-l",
        parameters=101_388,
        flops_per_unit=12_082_176.0,
        image_size=32,
        classes=10,
        architecture=tiny,
        blocks=blocks,
        optimizer=OPTIMIZER,
        dropout=RATES,
    ),
    variant(
        "efficientnet-v2-l",
        "EfficientNetV2-L (Tan and Le, 2021), 79 blocks",
        parameters=118_515_272,
        flops_per_unit=73_365_455_232.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        architecture=original,
        blocks=blocks,
        optimizer=OPTIMIZER,
        smallest_alone=33,
        dropout=RATES,
    ),
)
