"""Corrects predictions by earlier runs: the ratios of what was measured to what the formula predicts for the same cell.

Ratios are kept apart by what makes them alike, from the most alike to the least: the same workload, precision and strategy;
then the same workload and precision. They are of one GPU model. A prediction is multiplied by the median ratio; its range is
that of the ratios, at least 5 % to each side, because a single run is no spread.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from shardlab.cell import Cell
from shardlab.prediction import PredictedRange

Key = tuple[str, ...]
LEAST_SPREAD = 0.05


class MeasuredRatio(msgspec.Struct, frozen=True):
    """One completed run. time, memory: measured over predicted; None if one of both is not known. gpu: the name of its GPU."""

    cell: Cell
    gpu: str
    time: float | None
    memory: float | None


class Calibration(msgspec.Struct, frozen=True):
    """Ratios by key, for times and for memory."""

    times: dict[Key, list[float]]
    memories: dict[Key, list[float]]

    def time(self, cell: Cell, gpu: str, span: PredictedRange) -> tuple[PredictedRange, str]:
        """(the corrected time of a step, how in words)."""
        return _corrected(self.times, cell, gpu, span)

    def memory(self, cell: Cell, gpu: str, span: PredictedRange) -> tuple[PredictedRange, str]:
        """(the corrected peak memory, how in words)."""
        return _corrected(self.memories, cell, gpu, span)


NOTHING = Calibration({}, {})


def of(ratios: Iterable[MeasuredRatio]) -> Calibration:
    """The calibration by these runs."""
    found = Calibration({}, {})
    for one in ratios:
        for key in _keys(one.cell, one.gpu):
            if one.time is not None:
                found.times.setdefault(key, []).append(one.time)
            if one.memory is not None:
                found.memories.setdefault(key, []).append(one.memory)
    return found


def _keys(cell: Cell, gpu: str) -> list[Key]:
    alike = (gpu, cell.workload, cell.workload_code or "", cell.precision)
    return [(*alike, cell.strategy), alike]


def _corrected(ratios: dict[Key, list[float]], cell: Cell, gpu: str, span: PredictedRange) -> tuple[PredictedRange, str]:
    for key in _keys(cell, gpu):
        if found := ratios.get(key):
            middle = median(found)
            low, high = min(*found, middle * (1 - LEAST_SPREAD)), max(*found, middle * (1 + LEAST_SPREAD))
            like = span.likely
            whose = f"of {cell.strategy}" if len(key) > len(_keys(cell, gpu)[1]) else f"of {cell.workload}"
            return PredictedRange(like * low, like * middle, like * high), f", calibrated by {len(found)} run(s) {whose}"
    return span, ""
