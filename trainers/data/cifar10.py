"""Reads CIFAR-10 in its official binary format. The whole set is kept in memory, because it is small.

The archive is https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz; the data path contains the folder of the archive.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from shardlab.files import files, image_files
from trainers.data.data_sets import DataSource
from trainers.data.images import ImageSet, resize_images

SIDE = 32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # per channel of the training set, with pixels from 0 to 1


class Cifar10(ImageSet):
    """The images of one split. They are resized bilinearly if the model needs another size than 32 pixels."""

    class_count = image_files.LABEL_COUNT

    def __init__(self, folder: Path, split: str, image_size: int) -> None:
        """Raises InputError with the name of a file whose content is not a number of whole records with labels below 10."""
        with files.as_workspace_error("read the data set"):
            content = b"".join(image_files.read_cifar10_records(folder / name) for name in image_files.CIFAR10_FILES[split])
        records = np.frombuffer(content, np.uint8).reshape(-1, image_files.CIFAR10_RECORD_BYTES)
        self._size = image_size
        self._labels = records[:, 0]
        self._pixels = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
        self.source = DataSource(
            name="CIFAR-10" if image_size == SIDE else f"CIFAR-10 resized to {image_size} x {image_size}",
            sha256=hashlib.sha256(content).hexdigest(),
            synthetic=False,
            items=len(records),
        )

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (MEAN, STD))
        normalized_images = (self._pixels[indices] * np.float32(1 / 255) - mean) / std
        return resize_images(normalized_images, self._size), self._labels[indices].astype(np.int64)
