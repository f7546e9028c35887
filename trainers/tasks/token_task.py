"""The base of the tasks of all language workloads: the tokens, the length of sequences, and predicting the next token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn

from shardlab.matrix.cell import Cell
from trainers.data.token_sets import open_tokens
from trainers.task import Batch, Task
from trainers.tasks.device_copy import copy_to_device
from trainers.workload_options import TokenOptions

if TYPE_CHECKING:
    from trainers.data.sequences import TokenSet


class TokenTask(Task):
    """A task that predicts the next token. vocabulary: number of tokens that the model knows; the data may use fewer."""

    def __init__(self, cell: Cell, data_path: Path, vocabulary: int) -> None:
        assert cell.seq_len is not None, "the workload has a default"
        self.seq_len, self.vocabulary = cell.seq_len, vocabulary
        self.units_per_item = cell.seq_len
        self._cell, self._data_path = cell, data_path
        self._use_tokens(self._open_split("train"))

    def _open_split(self, split: str) -> TokenSet:
        options = TokenOptions(self._cell.options)
        return open_tokens(
            options.data,
            self._data_path,
            split,
            seq_len=self.seq_len,
            vocabulary_size=self.vocabulary,
            tokens_file=options.tokens_file,
        )

    def _use_tokens(self, tokens: TokenSet) -> None:
        self._tokens, self.source = tokens, tokens.source

    def open_validation(self) -> Task:
        validation_task = copy.copy(self)
        validation_task._use_tokens(self._open_split("validation"))
        return validation_task

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        sequences = copy_to_device(self._tokens.read(indices), device)
        return Batch(inputs=sequences[:, :-1], targets=sequences[:, 1:])

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", model(input_ids=batch.inputs).logits)
