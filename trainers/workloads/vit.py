"""Workloads: image classification with a Vision Transformer of the transformers library, from random weights."""

from __future__ import annotations

from functools import partial

from shardlab.matrix.cell import Cell, Optimizer
from trainers.workload import Workload
from trainers.workload_options import IMAGENET_CLASSES, ImageOptions, Shape, list_image_options, refuse_shape

CHANNELS = 3
DROPOUT = 0.1  # the rate for training on ImageNet in Dosovitskiy et al., 2021, table 3
FLOPS_SOURCE = (
    "per image 72*L*d^2*S + 12*L*d*S^2 + 4*c*p^2*d*P + 6*d*K, the terms of PaLM's appendix B (Chowdhery et al., 2022) written "
    "out for a ViT: L layers, width d, P patches of p x p pixels in c colours, S = P + 1 positions, K classes"
)


def count_flops_per_image(shape: Shape, image_size: int, patch_size: int, classes: int) -> float:
    """Floating-point operations of forward and backward for one image, by FLOPS_SOURCE; a multiply-add counts as 2.

    A block has 12*d^2 weights. Each weight is used at S positions, in one multiply-add in forward and in two in backward. The
    two matrix products of attention with all S positions also count once in forward and twice in backward. The pixels of
    patches need no gradient, so a weight of the projection of patches counts 4 operations per position
    instead of 6. The head is used at one position.
    """
    layer_count, width = shape.layer_count, shape.width
    patches = (image_size // patch_size) ** 2
    positions = patches + 1
    blocks = 72.0 * layer_count * width**2 * positions + 12.0 * layer_count * width * positions**2
    return blocks + 4.0 * CHANNELS * patch_size**2 * width * patches + 6.0 * width * classes


def refuse(cell: Cell, *, patch_size: int) -> str | None:
    image_size = ImageOptions(cell.options).image_size
    if image_size % patch_size:
        return f"image_size: found {image_size}. Allowed: a multiple of {patch_size}, the side of a patch."
    return refuse_shape(cell)


def _make_workload(
    name: str, summary: str, parameter_count: int, shape: Shape, image_size: int, patch_size: int, classes: int
) -> Workload:
    return Workload(
        name=name,
        summary=summary,
        parameters=parameter_count,
        unit="images",
        flops_per_unit=count_flops_per_image(shape, image_size, patch_size, classes),
        flops_source=FLOPS_SOURCE,
        optimizer=Optimizer(name="adamw", lr=1e-3),
        task="trainers.tasks.vit",
        settings={"classes": classes, "patch": patch_size},
        refuse=partial(refuse, patch_size=patch_size),
        options=(*shape.list_options(), *list_image_options(image_size, f"{DROPOUT} behind each layer of a block")),
        heads="n_head",
        blocks="n_layer",
    )


VARIANTS = (
    _make_workload("vit-tiny", "Vision Transformer of 4 layers and width 64, 4 x 4 pixels a patch",
              208_074, Shape(4, 64, 4), 32, 4, 10),
    _make_workload("vit-b-32-tiny", "Vision Transformer of 4 layers and width 64, 8 x 8 pixels a patch, the twin of vit-b-32",
              214_218, Shape(4, 64, 4), 32, 8, 10),
    _make_workload("vit-b-32",
              "Vision Transformer ViT-B/32: 12 layers, width 768, 32 x 32 pixels a patch (Dosovitskiy et al., 2021)",
              88_224_232, Shape(12, 768, 12), 224, 32, IMAGENET_CLASSES),
)  # fmt: skip
