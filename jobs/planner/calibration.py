"""Corrects predictions by earlier runs: by the ratios of measured to predicted values of the same cell, and by the measured
power of GPUs.

The prediction for a cell is corrected by runs with the same GPU model, workload, precision and strategy or, if there are none,
by runs with the same GPU model, workload and precision. The predicted value is multiplied by the median of the ratios of these
runs. The range of the corrected value is the range of the ratios, but at least 5 % to each side, because a single run does not
show how much runs differ.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from statistics import median

import msgspec

from jobs.planner import gpu
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import PredictedRange, exact_range

Key = tuple[str, ...]
LEAST_SPREAD = 0.05
RUNS = "run(s)"
RESULTS = "result(s) in docs/results"


class MeasuredRatio(msgspec.Struct, frozen=True):
    """How the measurements of one completed run compare with its prediction."""

    cell: Cell
    gpu: str
    """The name of the GPU that the run used."""
    time: float | None
    """The measured time divided by the predicted time; None if one of the two is not known."""
    memory: float | None
    """The measured memory divided by the predicted memory; None if one of the two is not known."""
    power_w: float | None = None
    """The power of one GPU in watts while steps were timed; None if the power was not measured."""


class Calibration(msgspec.Struct, frozen=True):
    """The measurements that correct predictions: ratios of times and of memory, and the power of a GPU in watts, by key."""

    times: dict[Key, list[float]]
    memories: dict[Key, list[float]]
    powers: dict[Key, list[float]]
    whose: str = RUNS
    """A text that says where the measurements come from."""
    fallback: Calibration | None = None
    """Another calibration, used for cells for which this calibration has no measurement."""

    def time(self, cell: Cell, gpu: str, span: PredictedRange) -> tuple[PredictedRange, str]:
        """Correct the predicted time of a step. Returns (the corrected time, a text that says how it was obtained)."""
        if (corrected := _correct_by_ratios(self.times, self.whose, cell, gpu, span)) is not None:
            return corrected
        return (span, "") if self.fallback is None else self.fallback.time(cell, gpu, span)

    def memory(self, cell: Cell, gpu: str, span: PredictedRange) -> tuple[PredictedRange, str]:
        """Correct the predicted peak memory. Returns (the corrected memory, a text that says how it was obtained)."""
        if (corrected := _correct_by_ratios(self.memories, self.whose, cell, gpu, span)) is not None:
            return corrected
        return (span, "") if self.fallback is None else self.fallback.memory(cell, gpu, span)

    def power(self, cell: Cell, gpu: str, assumed: PredictedRange) -> tuple[PredictedRange, str]:
        """The power of a GPU. Returns (the measured watts, else `assumed`; a text that says how the watts were obtained)."""
        if (corrected := _correct_by_ratios(self.powers, self.whose, cell, gpu, exact_range(1.0))) is not None:
            return corrected
        return (assumed, "") if self.fallback is None else self.fallback.power(cell, gpu, assumed)


NOTHING = Calibration({}, {}, {})


def build_calibration(ratios: Iterable[MeasuredRatio], whose: str = RUNS, fallback: Calibration | None = None) -> Calibration:
    """Build a calibration from the measurements of runs.

    ratios: measured time and memory of runs, divided by the predicted values. whose: a text that says where the measurements
    come from. fallback: another calibration, which is used for cells without a measurement in `ratios`.
    """
    built = Calibration({}, {}, {}, whose, fallback)
    for ratio in ratios:
        for key in _calibration_keys(ratio.cell, ratio.gpu):
            if ratio.time is not None:
                built.times.setdefault(key, []).append(ratio.time)
            if ratio.memory is not None:
                built.memories.setdefault(key, []).append(ratio.memory)
            if ratio.power_w is not None:
                built.powers.setdefault(key, []).append(ratio.power_w)
    return built


def _calibration_keys(cell: Cell, gpu: str) -> list[Key]:
    shared_key = (_gpu_model_name(gpu), cell.workload, cell.workload_code or "", cell.precision)
    return [(*shared_key, cell.strategy), shared_key]


@functools.cache
def _gpu_model_name(name: str) -> str:
    """Convert the different names of a GPU model to one text. For example, a cluster file may write `a100` for a GPU that NVML
    calls NVIDIA A100-SXM4-40GB."""
    model = gpu.find_model(name)
    return name if model is None else model.name


def _correct_by_ratios(
    ratios: dict[Key, list[float]], unit: str, cell: Cell, gpu: str, span: PredictedRange
) -> tuple[PredictedRange, str] | None:
    for key in _calibration_keys(cell, gpu):
        if key_ratios := ratios.get(key):
            middle = median(key_ratios)
            low, high = min(*key_ratios, middle * (1 - LEAST_SPREAD)), max(*key_ratios, middle * (1 + LEAST_SPREAD))
            likely = span.likely
            runs = f"of {cell.strategy}" if len(key) > len(_calibration_keys(cell, gpu)[1]) else f"of {cell.workload}"
            return PredictedRange(
                likely * low, likely * middle, likely * high
            ), f", calibrated by {len(key_ratios)} {unit} {runs}"
    return None
