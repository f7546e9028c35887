"""The interface of a data set of token sequences, and the rule that splits such a set into training and validation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainers.data.data_sets import DataSource

VALIDATION_DIVISOR = 10  # the last tenth of the sequences is the validation split


class TokenSet(ABC):
    """One split of a data set of token sequences."""

    source: DataSource
    """The record of the data set."""
    vocabulary: int
    """Every token is smaller than this number, which is the same in every split."""

    @abstractmethod
    def read(self, indices: np.ndarray) -> np.ndarray:
        """The sequences with these indices, (n, seq_len + 1) in int64.

        The inputs are all tokens of a sequence but the last, the targets all tokens but the first. The result depends only on
        the indices. Several threads may call this method at the same time.
        """


def locate_split(sequence_count: int, split: str) -> tuple[int, int]:
    """Which sequences of a set belong to a split: (index of the first sequence, number of sequences). sequence_count: the
    number of
    sequences in the whole set. split: `train` or `validation`."""
    held_out_count = sequence_count // VALIDATION_DIVISOR
    return (0, sequence_count - held_out_count) if split == "train" else (sequence_count - held_out_count, held_out_count)
