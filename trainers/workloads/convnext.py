"""Image classification with torchvision's ConvNeXt, from random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shardlab.cell import Optimizer
from trainers.tasks.convolutional import of_type, variant
from trainers.tasks.image_task import IMAGENET_CLASSES

if TYPE_CHECKING:
    from torch import nn

OPTIMIZER = Optimizer(name="adamw", lr=1e-3)
STOCHASTIC_DEPTH = 0.5
RATES = "blocks are skipped with a probability that rises to 0.5"


def original(classes: int, dropout: bool) -> nn.Module:
    from torchvision.models import convnext_large

    return cast("nn.Module", convnext_large(num_classes=classes, stochastic_depth_prob=STOCHASTIC_DEPTH if dropout else 0.0))


def tiny(classes: int, dropout: bool) -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    widths = (16, 32, 64, 96, None)
    settings = [CNBlockConfig(widths[stage], widths[stage + 1], 2 if stage == 2 else 1) for stage in range(4)]
    return cast(
        "nn.Module",
        ConvNeXt(settings, stochastic_depth_prob=STOCHASTIC_DEPTH if dropout else 0.0, num_classes=classes),
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    from torchvision.models.convnext import CNBlock

    return of_type(CNBlock, model)


VARIANTS = (
    variant(
        "convnext-large-tiny",
        "ConvNeXt of 5 blocks with 16 to 96 channels, the twin of convnext-large",
        parameters=202_490,
        flops_per_unit=4_961_472.0,
        image_size=32,
        classes=10,
        architecture=tiny,
        blocks=blocks,
        optimizer=OPTIMIZER,
        dropout=RATES,
    ),
    variant(
        "convnext-large",
        "ConvNeXt-L (Liu et al., 2022), 36 blocks",
        parameters=197_767_336,
        flops_per_unit=206_110_798_848.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        architecture=original,
        blocks=blocks,
        optimizer=OPTIMIZER,
        dropout=RATES,
    ),
)
