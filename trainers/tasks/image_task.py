"""The base of the tasks of all image workloads: the data set, the size of the images and the number of classes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from shardlab.matrix.cell import Cell
from trainers.data.image_sets import open_images
from trainers.data.synthetic_images import SyntheticImages
from trainers.task import Batch, Task
from trainers.tasks.device_copy import copy_to_device
from trainers.workload_options import ImageOptions

if TYPE_CHECKING:
    from trainers.data.images import ImageSet


class ImageTask(Task):
    """A task that classifies images.

    classes: number of classes of the workload on the menu, which the synthetic data set uses. A data set in files has its own
    number of classes.
    """

    units_per_item = 1

    def __init__(self, cell: Cell, data_path: Path, classes: int) -> None:
        self._options = ImageOptions(cell.options)
        self.image_size, self.dropout = self._options.image_size, self._options.dropout
        self._data_path = data_path
        self._use_images(self._open_split("train", classes))

    @property
    def classes(self) -> int:
        """The number of classes of the data, which is also the number of outputs of the model."""
        return self._images.class_count

    def use_synthetic_images(self, classes: int) -> None:
        """Read synthetic images from now on, with this number of classes."""
        self._use_images(SyntheticImages("train", self.image_size, classes, None))

    def _open_split(self, split: str, classes: int) -> ImageSet:
        return open_images(
            self._options.data,
            self._data_path,
            split,
            image_size=self.image_size,
            class_count=classes,
            subset=self._options.subset,
            subset_seed=self._options.subset_seed,
        )

    def _use_images(self, images: ImageSet) -> None:
        self._images = images
        self.source = msgspec.structs.replace(images.source, classes=images.class_count)

    def open_validation(self) -> Task:
        validation_task = copy.copy(self)
        validation_task._use_images(self._open_split("validation", self.classes))
        return validation_task

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        images, labels = self._images.read(indices)
        return Batch(inputs=copy_to_device(images, device), targets=copy_to_device(labels, device))
