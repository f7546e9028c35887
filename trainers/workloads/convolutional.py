"""Workloads: image classification with convolutional networks of torchvision, from random weights.

There is no short formula for the floating-point operations of these networks, so their tasks count the operations.
"""

from __future__ import annotations

from functools import partial

from shardlab.matrix.cell import Cell, Optimizer
from shardlab.registry import TypedOptions, declare
from trainers.workload import Workload
from trainers.workload_options import IMAGENET_CLASSES, ImageOptions, list_image_options

SMALLEST_IMAGE = 32  # the smallest width of images in pixels, because the networks halve an image five times
FLOPS_SOURCE = (
    "per image 6*M - 2*M0: M multiply-adds of all convolutions and linear layers, 2 operations each, once in forward and "
    "twice in backward (Amodei and Hernandez, AI and Compute, 2018, appendix), without the gradient of the image, which is "
    "not needed (M0: multiply-adds of the first layer)"
)
ADAMW = Optimizer(name="adamw", lr=1e-3)
# The optimizer of He et al., 2016, section 3.4, and of Huang et al., 2017, section 4.2, for a global batch of 256 images.
SGD = Optimizer(name="sgd", lr=0.1)
VGG_SGD = Optimizer(name="sgd", lr=0.01)  # as in Simonyan and Zisserman, 2015, section 3.1, for a global batch of 256 images
VGG_TWIN_ADAMW = Optimizer(name="adamw", lr=2e-3)  # with VGG_SGD, the tiny twin learns nothing in a short run
CONVNEXT_RATES = "blocks are skipped with a probability that rises to 0.5"
EFFICIENTNET_RATES = "0.4 before the head, and blocks are skipped with a probability that rises to 0.2"
VGG_RATES = "0.5 between the linear layers"


class ConvolutionOptions(TypedOptions):
    channels_last: bool = declare(True, "on a GPU, images are in channels-last memory format (NHWC), which suits tensor cores")
    cudnn_benchmark: bool = declare(True, "on a GPU, cuDNN tries its algorithms on the first batch and keeps the fastest")


def refuse(cell: Cell, *, smallest_single: int) -> str | None:
    image_size = ImageOptions(cell.options).image_size
    if cell.micro_batch_size == 1 and image_size < smallest_single:
        return (
            f"image_size: found {image_size} with micro_batch_size 1, which leaves BatchNorm a single value per channel. "
            f"Allowed: image_size from {smallest_single}, or micro_batch_size from 2."
        )
    return None


def _make_workload(
    name: str,
    summary: str,
    parameter_count: int,
    flops_per_unit: float,
    optimizer: Optimizer,
    dropout: str | None = None,
    smallest_single: int = SMALLEST_IMAGE,
) -> Workload:
    """A convolutional network, or its tiny twin.

    dropout: the rates of the network's dropout in words; None if it has no dropout. smallest_single: the smallest image (width
    in pixels) for which a micro-batch may consist of a single image; with a smaller image, a BatchNorm would see one value per
    channel, which torch refuses. The other arguments are fields of `Workload`.
    """
    original_name, twin = name.removesuffix("-tiny"), name.endswith("-tiny")
    return Workload(
        name=name,
        summary=f"{summary}, the twin of {original_name}" if twin else summary,
        parameters=parameter_count,
        unit="images",
        flops_per_unit=flops_per_unit,
        flops_source=FLOPS_SOURCE,
        optimizer=optimizer,
        task="trainers.tasks.convolutional",
        settings={"network": original_name.replace("-", "_"), "twin": twin, "classes": 10 if twin else IMAGENET_CLASSES},
        options=(*list_image_options(32 if twin else 224, dropout, SMALLEST_IMAGE), *ConvolutionOptions.list_options()),
        refuse=partial(refuse, smallest_single=smallest_single),
    )


VARIANTS = (
    _make_workload("convnext-large-tiny", "ConvNeXt of 5 blocks with 16 to 96 channels",
              202_490, 4_961_472.0, ADAMW, CONVNEXT_RATES),
    _make_workload("convnext-large", "ConvNeXt-L (Liu et al., 2022), 36 blocks",
              197_767_336, 206_110_798_848.0, ADAMW, CONVNEXT_RATES),
    _make_workload("densenet121-tiny", "DenseNet of 3 dense blocks with 8 layers that grow by 12",
              64_486, 11_828_088.0, SGD),
    _make_workload("densenet121", "DenseNet-121 (Huang et al., 2017), 4 dense blocks",
              7_978_856, 16_768_942_080.0, SGD, smallest_single=64),
    _make_workload("efficientnet-v2-l-tiny", "EfficientNetV2 of 6 blocks with 16 to 48 channels",
              101_388, 12_082_176.0, ADAMW, EFFICIENTNET_RATES),
    _make_workload("efficientnet-v2-l", "EfficientNetV2-L (Tan and Le, 2021), 79 blocks",
              118_515_272, 73_365_455_232.0, ADAMW, EFFICIENTNET_RATES, smallest_single=33),
    _make_workload("resnet50-tiny", "ResNet of 4 narrow bottlenecks", 305_386, 18_683_904.0, SGD),
    _make_workload("resnet101-tiny", "ResNet of 5 narrow bottlenecks", 331_626, 19_298_304.0, SGD),
    _make_workload("resnet50", "ResNet-50 (He et al., 2016), 16 bottlenecks",
              25_557_032, 24_299_077_632.0, SGD, smallest_single=33),
    _make_workload("resnet101", "ResNet-101 (He et al., 2016), 33 bottlenecks",
              44_549_160, 46_572_404_736.0, SGD, smallest_single=33),
    _make_workload("vgg16-tiny", "VGG of 13 convolutions with 4 to 32 channels",
              163_054, 8_371_968.0, VGG_TWIN_ADAMW, VGG_RATES),
    # Most weights of a VGG are in 3 linear layers.
    _make_workload("vgg16", "VGG-16 (Simonyan and Zisserman, 2015, configuration D)",
              138_357_544, 92_648_177_664.0, VGG_SGD, VGG_RATES),
)  # fmt: skip
