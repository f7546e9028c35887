"""Whether a cell fits the memory of a GPU, and the largest micro-batch that fits."""

from __future__ import annotations

import math

from jobs.planner import memory
from shardlab.cell import Cell
from shardlab.prediction import Fits, PredictedRange

LARGEST = 1 << 20  # micro-batches above this are not looked for


def verdict(needed: PredictedRange, capacity: PredictedRange, *, complete: bool) -> Fits | None:
    """Whether the memory fits. complete: false if activations are not known: then only `no` can be said, else None."""
    if needed.low > capacity.high:
        return "no"
    if not complete:
        return None
    if needed.high <= capacity.low:
        return "yes"
    return "likely" if needed.likely <= capacity.likely else "unlikely"


def largest_micro_batch(cell: Cell, capacity: PredictedRange, *, on_gpu: bool, ratio: float = 1.0) -> int | None:
    """The largest micro_batch_size with as many passes that is likely to fit; 0: none. None if activations are not known.

    The memory is linear in the micro-batch where activations are the peak, and constant below: two points give the line, and
    the answer is checked against the whole formula. ratio: the memory is this many times as large as the formula says.
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
