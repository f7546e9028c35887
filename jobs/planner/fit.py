"""Decides whether a cell fits the memory of a GPU, and computes the largest micro-batch that fits."""

from __future__ import annotations

import math

from jobs.planner import memory
from shardlab.cell import Cell
from shardlab.prediction import Fits, PredictedRange

LARGEST = 1 << 20  # the largest micro-batch that is considered


def verdict(needed: PredictedRange, capacity: PredictedRange, *, complete: bool) -> Fits | None:
    """Whether the memory that a cell needs fits the memory of a GPU; None if it is not known.

    complete: false if the memory of activations is not known. `needed` is then a lower bound, so the only possible answers are
    `no` and None.
    """
    if needed.low > capacity.high:
        return "no"
    if not complete:
        return None
    if needed.high <= capacity.low:
        return "yes"
    return "likely" if needed.likely <= capacity.likely else "unlikely"


def largest_micro_batch(cell: Cell, capacity: PredictedRange, *, on_gpu: bool, ratio: float = 1.0) -> int | None:
    """The largest micro_batch_size that is likely to fit if the number of passes per step stays the same.

    Returns 0 if not even one item fits, and None if the memory of activations is not known.

    For small micro-batches, the memory is constant; for larger micro-batches, activations decide the peak, and the memory grows
    linearly. So a line through the memory of two large micro-batches gives a first result, which is then corrected by the whole
    formula. ratio: the real memory divided by the memory that the formula gives.
    """

    def needed(micro: int) -> float:
        return ratio * memory.of(cell, micro_batch=micro, on_gpu=on_gpu).bytes.likely

    if not memory.of(cell, on_gpu=on_gpu).complete:
        return None
    if needed(1) > capacity.likely:
        return 0
    far = needed(LARGEST)
    slope = (far - needed(LARGEST // 2)) / (LARGEST - LARGEST // 2)
    if slope <= 0 or far <= capacity.likely:
        return LARGEST
    guess = max(1, min(LARGEST, math.floor(LARGEST - (far - capacity.likely) / slope)))
    while guess > 1 and needed(guess) > capacity.likely:
        guess -= 1
    while guess < LARGEST and needed(guess + 1) <= capacity.likely:
        guess += 1
    return guess
