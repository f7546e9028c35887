"""The order of the data: which items are in which step. It depends only on the seed, so every strategy gets the same data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardlab.errors import InputError

if TYPE_CHECKING:
    from shardlab.matrix.cell import Cell

# The phases of a run. Each phase has its own permutations, so that the timed epochs are complete passes over the data.
WARMUP, TIMED, PROOF = 0, 1, 2


class DataOrder:
    """The items of each step: a new permutation of all items in every epoch, cut into global batches.

    The items after the last whole global batch of an epoch are left out. short_step_items: number of these items that are not
    left out, because each timed epoch has a short step with them at its end.
    """

    def __init__(self, item_count: int, global_batch_size: int, seed: int, short_step_items: int = 0) -> None:
        self._full_steps = item_count // global_batch_size  # number of steps of an epoch that have a whole global batch
        # number of steps of a timed epoch, including the short step
        self.steps_per_epoch = self._full_steps + (short_step_items > 0)
        if self._full_steps == 0:
            raise InputError(
                f"global_batch_size: found {global_batch_size}, but the data has {item_count} items. "
                f"Allowed: at most {item_count}."
            )
        self._item_count, self._batch_size = item_count, global_batch_size
        self._seed, self._short_step_items = seed, short_step_items
        self._current_permutation: tuple[tuple[int, int], np.ndarray] | None = None

    def count_timed_steps(self, cell: Cell) -> int:
        """The number of timed steps of a cell, whose length is given in steps or in epochs."""
        return cell.steps if cell.steps is not None else (cell.epochs or 0) * self.steps_per_epoch

    def with_short_step(self, rank_items: int) -> DataOrder:
        """The same order with an additional short step at the end of each timed epoch. rank_items: the number of items of one
        rank in a step; the short step has as many whole shares as the remaining items allow."""
        leftover_items = self._item_count % self._batch_size
        return DataOrder(self._item_count, self._batch_size, self._seed, leftover_items - leftover_items % rank_items)

    def count_items(self, phase: int, step: int) -> int:
        """The number of items in the global batch of a step. step: 0, 1, ... in the phase."""
        return self._batch_size if self._locate_step(phase, step)[1] < self._full_steps else self._short_step_items

    def list_batch_items(self, phase: int, step: int) -> np.ndarray:
        """The indices of the items in the global batch of a step, (count_items(phase, step),). step: 0, 1, ... in the phase."""
        epoch, position = self._locate_step(phase, step)
        begin = position * self._batch_size
        return self._permute_items(phase, epoch)[begin : begin + self.count_items(phase, step)]

    def list_micro_batches(
        self, phase: int, step: int, *, slice_index: int, slice_count: int, micro_batch_size: int
    ) -> list[np.ndarray]:
        """The micro-batches of one slice of a step's global batch, as indices of `micro_batch_size` items each.

        The global batch is divided into `slice_count` equal slices; `slice_index` is the number of the slice, from 0. In a
        short step, the first slices have their full size and all later slices are empty. Raises InputError if the sizes are not
        divisible.
        """
        slice_size, remainder = divmod(self._batch_size, slice_count)
        if remainder or slice_size % micro_batch_size:
            raise InputError(
                f"global_batch_size: {self._batch_size} cannot be divided into {slice_count} slices of "
                f"micro-batches of {micro_batch_size} items."
            )
        slice_items = self.list_batch_items(phase, step)[slice_index * slice_size : (slice_index + 1) * slice_size]
        return [slice_items[begin : begin + micro_batch_size] for begin in range(0, len(slice_items), micro_batch_size)]

    def _locate_step(self, phase: int, step: int) -> tuple[int, int]:
        """The place of a step in the order of a phase: (number of its epoch, position of the step in this epoch), both from
        0."""
        return divmod(step, self.steps_per_epoch if phase == TIMED else self._full_steps)

    def _permute_items(self, phase: int, epoch: int) -> np.ndarray:
        key = (phase, epoch)
        if self._current_permutation is None or self._current_permutation[0] != key:
            self._current_permutation = (key, np.random.default_rng([self._seed, *key]).permutation(self._item_count))
        return self._current_permutation[1]
