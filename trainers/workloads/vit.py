"""Image classification with a Vision Transformer of the transformers library, from random weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Cell, Optimizer
from trainers.tasks import image_task, transformer_shape, vision_library
from trainers.tasks.image_task import IMAGENET_CLASSES, ImageTask
from trainers.tasks.transformer_shape import Shape
from trainers.workload import Batch, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.plans.plan import Plan

CHANNELS = 3
DROPOUT = 0.1  # trained on ImageNet: Dosovitskiy et al., 2021, table 3
FLOPS_SOURCE = (
    "per image 72*L*d^2*S + 12*L*d*S^2 + 4*c*p^2*d*P + 6*d*K, the terms of PaLM's appendix B (Chowdhery et al., 2022) written "
    "out for a ViT: L layers, width d, P patches of p x p pixels in c colours, S = P + 1 positions, K classes"
)


def flops_per_image(shape: Shape, image_size: int, patch: int, classes: int) -> float:
    """Floating-point operations of forward and backward for one image, by FLOPS_SOURCE; a multiply-add counts as 2.

    A block has 12*d^2 weights, each used at S positions, once forward and twice backward; so is attention, whose two
    products meet all S positions. The patches need no gradient: their projection counts 4 instead of 6. The head
    sees one position.
    """
    layers, width = shape.layers, shape.width
    patches = (image_size // patch) ** 2
    positions = patches + 1
    blocks = 72.0 * layers * width**2 * positions + 12.0 * layers * width * positions**2
    return blocks + 4.0 * CHANNELS * patch**2 * width * patches + 6.0 * width * classes


class VitTask(ImageTask):
    """patch: width and height in pixels of a patch, which becomes one position."""

    def __init__(self, cell: Cell, data_path: Path, *, classes: int, patch: int) -> None:
        self._shape, self._patch = transformer_shape.of(cell), patch
        super().__init__(cell, data_path, classes)

    def model(self) -> nn.Module:
        vision_library.load()
        from transformers import ViTConfig, ViTForImageClassification

        return cast("nn.Module", ViTForImageClassification(ViTConfig(
            image_size=self.image_size,
            patch_size=self._patch,
            num_channels=CHANNELS,
            num_labels=self.classes,
            hidden_size=self._shape.width,
            intermediate_size=4 * self._shape.width,
            num_hidden_layers=self._shape.layers,
            num_attention_heads=self._shape.heads,
            hidden_dropout_prob=DROPOUT if self.dropout else 0.0,
            attention_probs_dropout_prob=0.0,
        )))  # fmt: skip

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(cast("Any", model).vit.layers)

    def plan(self) -> Plan:
        from trainers.plans.vit import VitPlan

        return VitPlan((self.image_size // self._patch) ** 2 + 1, self._shape.width)  # the class token before the patches

    def flops_per_unit(self) -> float:
        return flops_per_image(self._shape, self.image_size, self._patch, self.classes)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", model(pixel_values=batch.inputs).logits)


def refuse(cell: Cell, *, patch: int) -> str | None:
    size = cast("int", cell.options["image_size"])
    if size % patch:
        return f"image_size: found {size}. Allowed: a multiple of {patch}, the side of a patch."
    return transformer_shape.refuse(cell)


def _variant(name: str, summary: str, parameters: int, shape: Shape, image_size: int, patch: int, classes: int) -> Workload:
    return Workload(
        name=name,
        summary=summary,
        parameters=parameters,
        unit="images",
        flops_per_unit=flops_per_image(shape, image_size, patch, classes),
        flops_source=FLOPS_SOURCE,
        optimizer=Optimizer(name="adamw", lr=1e-3),
        build=partial(VitTask, classes=classes, patch=patch),
        refuse=partial(refuse, patch=patch),
        options=(*shape.options(), *image_task.options(image_size, f"{DROPOUT} behind each layer of a block")),
        heads="n_head",
        blocks="n_layer",
    )


VARIANTS = (
    _variant("vit-tiny", "Vision Transformer of 4 layers and width 64, 4 x 4 pixels a patch",
             208_074, Shape(4, 64, 4), 32, 4, 10),
    _variant("vit-b-32-tiny", "Vision Transformer of 4 layers and width 64, 8 x 8 pixels a patch, the twin of vit-b-32",
             214_218, Shape(4, 64, 4), 32, 8, 10),
    _variant("vit-b-32", "Vision Transformer ViT-B/32: 12 layers, width 768, 32 x 32 pixels a patch (Dosovitskiy et al., 2021)",
             88_224_232, Shape(12, 768, 12), 224, 32, IMAGENET_CLASSES),
)  # fmt: skip
