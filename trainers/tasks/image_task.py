"""The part that all image workloads share: the data set, the size of the images and the number of classes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from shardlab.cell import Cell
from shardlab.registry import Option
from trainers.data.image_sets import NAMES, open_images
from trainers.tasks.transfer import to_device
from trainers.workload import Batch, Task

if TYPE_CHECKING:
    import numpy as np
    import torch

    from trainers.data.images import ImageSet

SUBSET_SEED = 38850191  # in the code of the study that trained ResNet-101 on 131,072 images of ImageNet
IMAGENET_CLASSES = 1000


def options(image_size: int, dropout: str | None, smallest: int = 1) -> tuple[Option, ...]:
    """The options of an image workload. dropout: the architecture's own rates in words, or None if it has no dropout. smallest:
    the smallest width in pixels that the architecture supports."""
    rates = "the architecture has no dropout" if dropout is None else f"the architecture's own dropout: {dropout}"
    return (
        Option("data", "synthetic", "the data set; the model's head has one output per class of it", choices=NAMES),
        Option("image_size", image_size, "width and height of an image in pixels", least=smallest),
        Option("dropout", False, rates, choices=(False,) if dropout is None else (False, True)),
        Option(
            "subset", None, "number of images to train on, drawn by subset_seed; null: all", kind="int", least=1, nullable=True
        ),
        Option("subset_seed", SUBSET_SEED, "the seed that draws the images of a subset", least=0, most=2**63 - 1),
    )


class ImageTask(Task):
    """classes: number of classes of the synthetic data set, and of the workload on the menu. A data set in files has its own
    number of classes."""

    units_per_item = 1

    def __init__(self, cell: Cell, data_path: Path, classes: int) -> None:
        self.image_size = cast("int", cell.options["image_size"])
        self.dropout = bool(cell.options["dropout"])
        self._cell, self._data_path = cell, data_path
        self._read(self._opened("train", classes))

    @property
    def classes(self) -> int:
        """Number of classes of the data, and of outputs of the model's head."""
        return self._images.classes

    def _opened(self, split: str, classes: int) -> ImageSet:
        asked = self._cell.options
        return open_images(
            cast("str", asked["data"]),
            self._data_path,
            split,
            size=self.image_size,
            classes=classes,
            subset=cast("int | None", asked["subset"]),
            subset_seed=cast("int", asked["subset_seed"]),
        )

    def _read(self, images: ImageSet) -> None:
        self._images = images
        self.source = msgspec.structs.replace(images.source, classes=images.classes)

    def validation(self) -> Task:
        other = copy.copy(self)
        other._read(self._opened("validation", self.classes))
        return other

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        images, labels = self._images.read(indices)
        return Batch(inputs=to_device(images, device), targets=to_device(labels, device))
