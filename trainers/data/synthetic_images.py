"""Generates synthetic images that a model can learn, in any size and with any number of classes. No files are needed."""

from __future__ import annotations

import hashlib

import numpy as np

from shardlab.errors import InputError
from trainers.data.data_sets import DataSource
from trainers.data.images import ImageSet

CLASS_COUNT, ITEMS_BY_SPLIT = 10, {"train": 2_000, "validation": 500}
SEED, VERSION = 10, 1  # if the rule for the images changes, the version must change, because it is in the checksum
PATTERN_FIELDS = 4  # the pattern of a class has 4 x 4 fields in each colour
PATTERN, NOISE = 1.3, 1.15  # half-widths of two uniform distributions; a pixel is their sum, with standard deviation 1


class SyntheticImages(ImageSet):
    """Images that consist of the coarse pattern of their class and noise. Both depend only on a fixed seed and the image's
    index, so no image is stored."""

    def __init__(self, split: str, size: int, class_count: int, items: int | None) -> None:
        """items: number of images in the split; None: 2,000 for `train`, 500 for `validation`. Raises InputError for fewer than
        2 classes."""
        if class_count < 2:
            raise InputError(f"classes: found {class_count}. Allowed: at least 2, or there is nothing to learn.")
        self.class_count, self._size = class_count, size
        item_count = items or ITEMS_BY_SPLIT[split]
        self._first_index = 0 if split == "train" else 2**40  # far above each number of a `train` image: no common image
        random_numbers = (
            np.random.Philox(key=np.array([SEED, 2**63], np.uint64)).random_raw(class_count * 3 * PATTERN_FIELDS**2) / 2.0**64
        )
        patterns = (2 * random_numbers - 1).reshape(class_count, 3, PATTERN_FIELDS, PATTERN_FIELDS) * PATTERN - NOISE
        self._fields = np.arange(size) * PATTERN_FIELDS // size
        self._patterns = patterns.astype(np.float32)[..., self._fields]  # patterns with `size` columns, but only COARSE rows
        rule = f"synthetic images {VERSION}, seed {SEED}, {split}, {item_count} of {size} x {size} in {class_count} classes"
        self.source = DataSource(
            name=f"synthetic images, {size} x {size}, {class_count} classes",
            sha256=hashlib.sha256(rule.encode()).hexdigest(),
            synthetic=True,
            items=item_count,
        )

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self._size
        value_count = 3 * size * size
        labels = np.empty(len(indices), np.int64)
        images = np.empty((len(indices), 3, size, size), np.float32)
        for row, index in enumerate(indices):
            # Philox is a counter-based generator, so an image can be drawn without the images before it. One draw of 64 bits
            # gives 8 pixels.
            generator = np.random.Philox(key=np.array([SEED, self._first_index + int(index)], np.uint64))
            random_numbers = generator.random_raw(1 + (value_count + 7) // 8)
            labels[row] = random_numbers[0] % self.class_count
            noise = random_numbers[1:].view(np.uint8)[:value_count].reshape(3, size, size)
            np.multiply(noise, np.float32(2 * NOISE / 255), out=images[row])
            images[row] += self._patterns[labels[row]].take(self._fields, axis=1)
        return images, labels
