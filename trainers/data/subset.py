"""Fewer images of a set, drawn by a seed, so that a study's share of a data set is the same on every machine."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from shardlab.errors import InputError
from trainers.data.images import ImageSet

if TYPE_CHECKING:
    import numpy as np


def draw(items: int, subset: int, seed: int, name: str) -> np.ndarray:
    """The indices of `subset` of `items` items, ascending, (subset,) in int64. Raises InputError where there are too few."""
    import numpy as np

    if subset > items:
        raise InputError(f"subset: found {subset}, but {name} has {items} images. Allowed: at most {items}.")
    # Raw numbers, whose stream NumPy keeps from version to version, as it does not that of `permutation`.
    numbers = np.random.Philox(key=np.array([seed, 0], np.uint64)).random_raw(items)
    return np.sort(np.argsort(numbers, kind="stable")[:subset])


class Subset(ImageSet):
    """Some images of another set, whose checksum follows from the set's and from which they are."""

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
