"""The interface of a data set of labelled images, and functions for all these sets: subsets and resizing."""

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
    """One split of a data set of labelled images."""

    source: DataSource
    """The record of the data set."""
    class_count: int
    """Number of classes, the same in every split; labels are 0 to classes - 1."""

    @abstractmethod
    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The images with these indices, (n, 3, size, size) in float32 and normalised, and their labels, (n,) in int64.

        The result depends only on the indices. Several threads may call this method at the same time. Raises InputError with
        the name of a damaged file.
        """


def draw_subset(item_count: int, subset_size: int, seed: int, set_name: str) -> np.ndarray:
    """Draw `subset_size` of `item_count` items at random. Returns their indices in ascending order, (subset_size,) in int64.

    set_name: the data set, for messages. Raises InputError if there are fewer items than `subset_size`.
    """
    if subset_size > item_count:
        raise InputError(f"subset: found {subset_size}, but {set_name} has {item_count} images. Allowed: at most {item_count}.")
    # Raw random numbers are sorted, because NumPy guarantees that they are the same in all its versions. It does not guarantee
    # this for the result of `permutation`.
    random_numbers = np.random.Philox(key=np.array([seed, 0], np.uint64)).random_raw(item_count)
    return np.sort(np.argsort(random_numbers, kind="stable")[:subset_size])


class Subset(ImageSet):
    """Some images of another set, `full_set`. The checksum of the subset is computed from the checksum of `full_set` and the
    indices of the images."""

    def __init__(self, full_set: ImageSet, subset_size: int, seed: int) -> None:
        """Raises InputError if `full_set` has fewer than `subset_size` images."""
        self._full_set = full_set
        self._indices = draw_subset(full_set.source.items, subset_size, seed, full_set.source.name)
        self.class_count = full_set.class_count
        subset_digest = hashlib.sha256(bytes.fromhex(full_set.source.sha256) + self._indices.astype("<i8").tobytes())
        self.source = msgspec.structs.replace(
            full_set.source,
            name=f"{full_set.source.name}, {subset_size} images by seed {seed}",
            sha256=subset_digest.hexdigest(),
            items=subset_size,
        )

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._full_set.read(self._indices[indices])


def resize_images(images: np.ndarray, size: int) -> np.ndarray:
    """Resize images bilinearly, from (n, c, h, w) to (n, c, size, size), in float32.

    The result is the same as with Pillow's BILINEAR: when an image shrinks, a pixel is a weighted mean of all pixels that it
    covers.
    """
    height, width = images.shape[-2:]
    images = images.astype(np.float32, copy=False)
    if (height, width) == (size, size):
        return images
    resized_images: np.ndarray = _compute_resize_weights(height, size) @ images @ _compute_resize_weights(width, size).T
    return resized_images


@functools.cache
def _compute_resize_weights(source_pixels: int, target_pixels: int) -> np.ndarray:
    """The weights for resizing one dimension from `source_pixels` to `target_pixels` pixels, (target_pixels,
    source_pixels). Each row is a triangle around the centre of a target pixel, with the sum 1."""
    source_per_target = source_pixels / target_pixels
    centres = (np.arange(target_pixels) + 0.5) * source_per_target
    distances = np.abs(np.arange(source_pixels) + 0.5 - centres[:, None]) / max(source_per_target, 1.0)
    triangle_weights = np.maximum(0.0, 1.0 - distances)
    weights: np.ndarray = (triangle_weights / triangle_weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights
