"""Reads MNIST from its official IDX files, unpacked or as they are published (.gz). The whole set is kept in memory.

The grey plane is repeated three times, for networks with three colours. If the model needs 28 x 28 pixels, the images are not
changed. Otherwise they get two black pixels on each side (32 x 32), and are then resized bilinearly if the model needs another
size than 32.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from shardlab.files import files, image_files
from trainers.data.data_sets import DataSource
from trainers.data.images import ImageSet, resize_images

SIDE, FRAME = 28, 2
MEAN, STD = 0.1307, 0.3081  # mean and deviation of all pixels of the official training set, with pixels from 0 to 1


class Mnist(ImageSet):
    """The images of one split, from its file of images and its file of labels."""

    class_count = image_files.LABEL_COUNT

    def __init__(self, folder: Path, split: str, image_size: int) -> None:
        """Raises InputError with the file if images do not have 28 x 28 pixels, or if there is not one label below 10 for each
        image."""
        with files.as_workspace_error("read the data set"):
            pixels, labels = image_files.read_mnist(folder, split)
        self._pixels = np.frombuffer(pixels, np.uint8).reshape(-1, SIDE, SIDE)
        self._labels = np.frombuffer(labels, np.uint8)
        self._size = image_size
        size_note = {SIDE: "", SIDE + 2 * FRAME: " framed to 32 x 32"}.get(
            image_size, f" framed to 32 x 32, resized to {image_size} x {image_size}"
        )
        self.source = DataSource(
            name=f"MNIST, grey in three colours{size_note}",
            sha256=hashlib.sha256(pixels + labels).hexdigest(),
            synthetic=False,
            items=len(self._labels),
        )

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pixels = self._pixels[indices, None]
        if self._size != SIDE:
            pixels = np.pad(pixels, ((0, 0), (0, 0), (FRAME, FRAME), (FRAME, FRAME)))
        normalized_images = resize_images((pixels * np.float32(1 / 255) - np.float32(MEAN)) / np.float32(STD), self._size)
        return np.repeat(normalized_images, 3, axis=1), self._labels[indices].astype(np.int64)
