"""What a reader of labelled images gives, whatever files they lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.errors import InputError

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


def not_staged(name: str, missing: Path) -> InputError:
    """What to say where a set's files are not there: nothing is ever put in their place unasked."""
    return InputError(
        f"{missing}: not found, so there is no {name} to read. `provision` stages it: write "
        f"`data: {{sets: [{{name: {name}, archive: PATH_OR_URL}}]}}` into cluster.yaml (docs/data.md). "
        f"Allowed without any file: the data set synthetic."
    )
