"""A subset of a set of images, drawn by a seed: a study trains on the same images on every machine."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from shardlab.errors import InputError
from trainers.data.images import ImageSet

if TYPE_CHECKING:
    import numpy as np


def draw(items: int, subset: int, seed: int, name: str) -> np.ndarray:
    """The indices of `subset` of `items` items, ascending, (subset,) in int64. Raises InputError if there are too few."""
    import numpy as np

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
