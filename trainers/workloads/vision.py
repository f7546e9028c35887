"""Name what is in a small image with a Vision Transformer of the transformers library, from random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Cell, Optimizer
from shardlab.errors import InputError
from shardlab.registry import Option
from trainers import vision_library
from trainers.data.image_sets import open_images
from trainers.workload import Batch, Task, Workload

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from trainers.plans.plan import Plan

IMAGE, PATCH, CHANNELS, CLASSES = 32, 4, 3, 10  # pixels, pixels, colours, labels
N_LAYER, N_EMBD, N_HEAD = 4, 64, 4
PARAMETERS = 208_074
FLOPS_SOURCE = (
    "per image 72*L*d^2*S + 12*L*d*S^2 + 4*c*p^2*d*P + 6*d*K, the terms of PaLM's appendix B (Chowdhery et al., 2022) written "
    "out for a ViT: L layers, width d, P patches of p x p pixels in c colours, S = P + 1 positions, K classes"
)


def flops_per_image(n_layer: int, n_embd: int) -> float:
    """Floating-point operations of forward and backward for one image, by FLOPS_SOURCE; a multiply-add counts as 2.

    A block has 12*d^2 weights, each used at S positions, once forward and twice backward; so is attention, whose two
    products meet all S positions. The patches need no gradient: their projection counts 4 instead of 6. The head
    sees one position.
    """
    patches = (IMAGE // PATCH) ** 2
    positions = patches + 1
    blocks = 72.0 * n_layer * n_embd**2 * positions + 12.0 * n_layer * n_embd * positions**2
    return blocks + 4.0 * CHANNELS * PATCH**2 * n_embd * patches + 6.0 * n_embd * CLASSES


class VitTask(Task):
    units_per_item = 1

    def __init__(self, cell: Cell, data_path: Path) -> None:
        layers, width, heads = (cast("int", cell.options[name]) for name in ("n_layer", "n_embd", "n_head"))
        if width % heads:
            raise InputError(f"n_embd: {width} does not divide among {heads} heads (n_head).")
        self._layers, self._width, self._heads = layers, width, heads
        self._images = open_images("synthetic", data_path, "train", size=IMAGE, classes=CLASSES, subset=None, subset_seed=0)
        self.source = self._images.source

    def model(self) -> nn.Module:
        vision_library.load()
        from transformers import ViTConfig, ViTForImageClassification

        return cast("nn.Module", ViTForImageClassification(ViTConfig(
            image_size=IMAGE,
            patch_size=PATCH,
            num_channels=CHANNELS,
            num_labels=CLASSES,
            hidden_size=self._width,
            intermediate_size=4 * self._width,
            num_hidden_layers=self._layers,
            num_attention_heads=self._heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )))  # fmt: skip

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(cast("Any", model).vit.layers)

    def plan(self) -> Plan:
        from trainers.plans.vit import VitPlan

        return VitPlan((IMAGE // PATCH) ** 2 + 1, self._width)  # the class token before the patches

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        import torch

        images, labels = self._images.read(indices)
        return Batch(inputs=torch.from_numpy(images).to(device), targets=torch.from_numpy(labels).to(device))

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", model(pixel_values=batch.inputs).logits)

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.float(), targets)


VARIANTS = (
    Workload(
        name="vit-tiny",
        summary="Vision Transformer of 4 layers and width 64 on synthetic images of 32 x 32",
        parameters=PARAMETERS,
        unit="images",
        flops_per_unit=flops_per_image(N_LAYER, N_EMBD),
        flops_source=FLOPS_SOURCE,
        optimizer=Optimizer(name="adamw", lr=1e-3),
        build=VitTask,
        options=(
            Option("n_layer", N_LAYER, "transformer blocks"),
            Option("n_embd", N_EMBD, "width"),
            Option("n_head", N_HEAD, "attention heads; they divide the width"),
        ),
        heads="n_head",
        blocks="n_layer",
    ),
)
