"""The interface of a reader of labelled images, independent of the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from trainers.workload import DataSource


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


def not_staged(name: str, missing: Path) -> InputError:
    """The error if the files of a data set are missing. They are never replaced by other data without being asked."""
    return InputError(
        f"{missing}: not found, so the data set {name} cannot be read. To let `provision` stage it, write "
        f"`data: {{sets: [{{name: {name}, archive: PATH_OR_URL}}]}}` into cluster.yaml (docs/data.md). "
        f"Allowed without any file: the data set synthetic."
    )
