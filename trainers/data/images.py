"""What a reader of labelled images gives, whatever files they lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from trainers.workload import DataSource


class ImageSet(ABC):
    """One split of a data set. classes: how many labels there are, 0 to classes - 1, in every split alike."""

    source: DataSource
    classes: int

    @abstractmethod
    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The images with these indices, (n, 3, size, size) in float32 and normalised, and their labels, (n,) in int64.

        A function of the indices alone, and safe to call from several threads at once. Raises InputError, naming the
        file, for one that is damaged.
        """
