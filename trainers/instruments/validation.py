"""The instrument `validation`: measures loss and accuracy on the validation split during a run. It shows whether a faster
strategy loses accuracy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardlab.errors import InputError
from shardlab.matrix.cell import Cell, Validation
from shardlab.runs.record import SCHEMA, LineWriter, ValidationRecord
from trainers.data.prefetch import prefetch_results
from trainers.instrument import Instrument

if TYPE_CHECKING:
    from pathlib import Path

    from trainers.data.order import DataOrder
    from trainers.engine import Trainable
    from trainers.ranks.ranks import Peers, Ranks
    from trainers.task import Batch, Task


class Validator(Instrument):
    """Evaluates the model on the validation split. The items are divided over ranks and micro-batches as in a training step;
    the items after the last whole global batch are left out."""

    name = "validation"

    def __init__(
        self,
        settings: Validation,
        cell: Cell,
        task: Task,
        engine: Trainable,
        ranks: Ranks,
        peers: Peers,
        data_order: DataOrder,
        path: Path,
        *,
        may_wait: bool,
    ) -> None:
        """settings: the settings of the cell. path: the file for the records, which rank 0 writes. may_wait: whether ranks may
        wait for each other before the last step; if not, only the last step is followed by a validation. Raises InputError if
        the data set has no validation split, or if the split is smaller than a global batch.
        """
        validation_split = task.open_validation()
        if validation_split is None:
            raise InputError(
                f"instruments.validation: the data of {cell.workload} has no validation split. Allowed: leave validation out."
            )
        item_count = min(settings.items or validation_split.source.items, validation_split.source.items)
        self._batch_count = item_count // cell.global_batch_size
        if self._batch_count == 0:
            raise InputError(
                f"instruments.validation: {item_count} validation items do not fill a global batch of "
                f"{cell.global_batch_size}. Allowed: a smaller global batch, or more items."
            )
        self._cell, self._split, self._engine, self._ranks, self._peers = cell, validation_split, engine, ranks, peers
        self._interval_steps = settings.interval_steps(data_order.steps_per_epoch)
        self._step_count, self._may_wait, self._path = data_order.count_timed_steps(cell), may_wait, path
        self._last_record: ValidationRecord | None = None

    def is_due(self, step: int) -> bool:
        return step == self._step_count or (self._may_wait and step % self._interval_steps == 0)

    def after_step(self, step: int) -> None:
        if not self._may_wait:  # all ranks evaluate the parameters that servers have after the last push of the last rank
            self._peers.barrier()
        self._engine.refresh_parameters()
        mean_loss = torch.zeros((), device=self._ranks.device)
        correct_predictions = torch.zeros((), dtype=torch.int64, device=self._ranks.device)
        target_count = 0
        self._engine.model.eval()
        try:
            for batches in prefetch_results(
                partial(self._fetch_batches, batch_number) for batch_number in range(self._batch_count)
            ):
                for batch in batches:
                    batch_loss, batch_correct = self._engine.evaluate(batch)
                    mean_loss += batch_loss / (len(batches) * self._batch_count)
                    correct_predictions += batch_correct
                    target_count += batch.targets.numel()
        finally:
            self._engine.model.train()
        sums = self._peers.all_gather_numbers([float(mean_loss), float(correct_predictions), float(target_count)])
        self._last_record = ValidationRecord(
            schema=SCHEMA,
            step=step,
            t_s=time.monotonic(),
            wall_s=time.time(),
            loss=float(sums[:, 0].mean()),
            accuracy=float(sums[:, 1].sum() / sums[:, 2].sum()),  # a slice that n ranks share is n times in both sums
            items=self._batch_count * self._cell.global_batch_size,
        )
        if self._ranks.rank == 0:
            with LineWriter(self._path) as line_writer:
                line_writer.write_record(self._last_record)

    def collect_results(self) -> dict[str, Any]:
        if self._last_record is None:
            return {}
        return {"items": self._last_record.items, "loss": self._last_record.loss, "accuracy": self._last_record.accuracy}

    def _fetch_batches(self, batch_number: int) -> list[Batch]:
        rank_items, micro_batch_size = self._cell.global_batch_size // self._engine.data_ranks, self._cell.micro_batch_size
        first_item = batch_number * self._cell.global_batch_size + self._engine.data_rank * rank_items
        return [
            self._split.fetch(indices, self._ranks.device)
            for indices in _list_micro_batch_indices(first_item, rank_items, micro_batch_size)
        ]


def _list_micro_batch_indices(first_item: int, rank_items: int, micro_batch_size: int) -> Iterator[np.ndarray]:
    for start in range(first_item, first_item + rank_items, micro_batch_size):
        yield np.arange(start, start + micro_batch_size)
