"""Image classification with torchvision's ResNet, from random weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from shardlab.cell import Optimizer
from trainers.tasks.convolutional import of_type, variant
from trainers.tasks.image_task import IMAGENET_CLASSES

if TYPE_CHECKING:
    from torch import nn

OPTIMIZER = Optimizer(name="sgd", lr=0.1)  # He et al., 2016, section 3.4, at 256 images


def original(depth: int, classes: int, dropout: bool) -> nn.Module:
    from torchvision import models

    return cast("nn.Module", getattr(models, f"resnet{depth}")(num_classes=classes))


def tiny(layers: tuple[int, int, int, int], classes: int, dropout: bool) -> nn.Module:
    """Bottlenecks of 8 to 64 channels that do not widen fourfold. The last stage keeps 2 x 2 positions of 32 x 32 pixels, so
    that BatchNorm has more than one value per channel even if a micro-batch is one image."""
    from torchvision.models.resnet import Bottleneck, ResNet

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


def blocks(model: nn.Module) -> list[nn.Module]:
    from torchvision.models.resnet import Bottleneck

    return of_type(Bottleneck, model)


VARIANTS = (
    variant(
        "resnet50-tiny",
        "ResNet of 4 narrow bottlenecks, the twin of resnet50",
        parameters=305_386,
        flops_per_unit=18_683_904.0,
        image_size=32,
        classes=10,
        architecture=partial(tiny, (1, 1, 1, 1)),
        blocks=blocks,
        optimizer=OPTIMIZER,
    ),
    variant(
        "resnet101-tiny",
        "ResNet of 5 narrow bottlenecks, the twin of resnet101",
        parameters=331_626,
        flops_per_unit=19_298_304.0,
        image_size=32,
        classes=10,
        architecture=partial(tiny, (1, 1, 2, 1)),
        blocks=blocks,
        optimizer=OPTIMIZER,
    ),
    variant(
        "resnet50",
        "ResNet-50 (He et al., 2016), 16 bottlenecks",
        parameters=25_557_032,
        flops_per_unit=24_299_077_632.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        architecture=partial(original, 50),
        blocks=blocks,
        optimizer=OPTIMIZER,
        smallest_alone=33,
    ),
    variant(
        "resnet101",
        "ResNet-101 (He et al., 2016), 33 bottlenecks",
        parameters=44_549_160,
        flops_per_unit=46_572_404_736.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        architecture=partial(original, 101),
        blocks=blocks,
        optimizer=OPTIMIZER,
        smallest_alone=33,
    ),
)
