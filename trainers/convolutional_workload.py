"""What the menu entries of convolutional networks have in common.

There is no short formula for the floating-point operations of these networks, so their tasks count the operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from shardlab.matrix.cell import Cell, Optimizer
from shardlab.registry import Option
from trainers.workload import Workload
from trainers.workload_options import of_images

OPTIONS = (
    Option("channels_last", True, "on a GPU, images are in channels-last memory format (NHWC), which suits tensor cores"),
    Option("cudnn_benchmark", True, "on a GPU, cuDNN tries its algorithms on the first batch and keeps the fastest"),
)
SMALLEST_IMAGE = 32  # the smallest width of images in pixels, because the networks halve an image five times
FLOPS_SOURCE = (
    "per image 6*M - 2*M0: M multiply-adds of all convolutions and linear layers, 2 operations each, once in forward and "
    "twice in backward (Amodei and Hernandez, AI and Compute, 2018, appendix), without the gradient of the image, which is "
    "not needed (M0: multiply-adds of the first layer)"
)


def convolutional_workload(
    name: str,
    summary: str,
    *,
    parameters: int,
    flops_per_unit: float,
    image_size: int,
    classes: int,
    task: str,
    optimizer: Optimizer,
    dropout: str | None = None,
    smallest_single: int = SMALLEST_IMAGE,
    **settings: Any,
) -> Workload:
    """A convolutional workload for the menu.

    task: the module that builds the network. settings: further keyword arguments for this module. dropout: the rates of the
    network's dropout in words; None if it has no dropout. smallest_single: the smallest image (width in pixels) for which a
    micro-batch may consist of a single image; with a smaller image, a BatchNorm would see one value per channel, which torch
    refuses. The other arguments are fields of `Workload`.
    """
    return Workload(
        name=name,
        summary=summary,
        parameters=parameters,
        unit="images",
        flops_per_unit=flops_per_unit,
        flops_source=FLOPS_SOURCE,
        optimizer=optimizer,
        task=task,
        settings={"classes": classes, **settings},
        options=(*of_images(image_size, dropout, SMALLEST_IMAGE), *OPTIONS),
        refuse=partial(refuse, smallest_single=smallest_single),
    )


def refuse(cell: Cell, *, smallest_single: int) -> str | None:
    size = cast("int", cell.options["image_size"])
    if cell.micro_batch_size == 1 and size < smallest_single:
        return (
            f"image_size: found {size} with micro_batch_size 1, which leaves BatchNorm a single value per channel. "
            f"Allowed: image_size from {smallest_single}, or micro_batch_size from 2."
        )
    return None
