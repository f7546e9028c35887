"""The interface of a reader of token sequences, independent of the file format, and the split of every set of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainers.data.data_sets import DataSource

VALIDATION = 10  # one sequence of so many, the last ones


class TokenSet(ABC):
    """One split of a set. vocabulary: every token is smaller; the same in every split."""

    source: DataSource
    vocabulary: int

    @abstractmethod
    def read(self, indices: np.ndarray) -> np.ndarray:
        """The sequences with these indices, (n, seq_len + 1) in int64: inputs are all but the last, targets all but the first.

        The result depends on the indices alone. Several threads may call it at once.
        """


def part(sequences: int, split: str) -> tuple[int, int]:
    """(the first of a split's sequences, how many it has) of so many in the whole set."""
    held_out = sequences // VALIDATION
    return (0, sequences - held_out) if split == "train" else (sequences - held_out, held_out)
