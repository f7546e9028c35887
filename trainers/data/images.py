"""The interface of a reader of labelled images, and what readers share: subsets and resizing."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardlab.errors import InputError

if TYPE_CHECKING:
    from trainers.data.data_sets import DataSource


class ImageSet(ABC):
    """One split of a data set. classes: number of labels, which are 0 to classes - 1; the same in every split."""

    source: DataSource
    classes: int

    @abstractmethod
    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The images with these indices, (n, 3, size, size) in float32 and normalised, and their labels, (n,) in int64.

        The result depends on the indices alone. Several threads may call it at once. Raises InputError, naming the file, if a
        file is damaged.
        """


def draw(items: int, subset: int, seed: int, name: str) -> np.ndarray:
    """The indices of `subset` of `items` items, ascending, (subset,) in int64. Raises InputError if there are too few."""
    if subset > items:
        raise InputError(f"subset: found {subset}, but {name} has {items} images. Allowed: at most {items}.")
    # Raw numbers: NumPy guarantees their stream in all its versions, but not the result of `permutation`.
    numbers = np.random.Philox(key=np.array([seed, 0], np.uint64)).random_raw(items)
    return np.sort(np.argsort(numbers, kind="stable")[:subset])


class Subset(ImageSet):
    """Some images of another set. The checksum is computed from the checksum of the set and the indices of the images."""

    def __init__(self, whole: ImageSet, subset: int, seed: int) -> None:
        """Raises InputError where the set has fewer images."""
        self._whole = whole
        self._chosen = draw(whole.source.items, subset, seed, whole.source.name)
        self.classes = whole.classes
        digest = hashlib.sha256(bytes.fromhex(whole.source.sha256) + self._chosen.astype("<i8").tobytes())
        self.source = msgspec.structs.replace(
            whole.source,
            name=f"{whole.source.name}, {subset} images by seed {seed}",
            sha256=digest.hexdigest(),
            items=subset,
        )

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._whole.read(self._chosen[indices])


def resized(images: np.ndarray, size: int) -> np.ndarray:
    """Bilinear, (n, c, h, w) to (n, c, size, size) in float32, as Pillow's BILINEAR: shrinking averages over what it spans."""
    height, width = images.shape[-2:]
    images = images.astype(np.float32, copy=False)
    if (height, width) == (size, size):
        return images
    result: np.ndarray = _weights(height, size) @ images @ _weights(width, size).T
    return result


@functools.cache
def _weights(source: int, target: int) -> np.ndarray:
    """Each of `target` pixels as a mean of `source` pixels, (target, source): a triangle about its centre."""
    scale = source / target
    centres = (np.arange(target) + 0.5) * scale
    distance = np.abs(np.arange(source) + 0.5 - centres[:, None]) / max(scale, 1.0)
    triangle = np.maximum(0.0, 1.0 - distance)
    weights: np.ndarray = (triangle / triangle.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights
