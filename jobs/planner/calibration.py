"""Corrects predictions by earlier runs: by the ratios of measured to predicted values, and by the measured power of GPUs.

A run of the same step (model, batch, strategy, GPUs) replaces the prediction: the predicted value is multiplied by the median
of the ratios of such runs, and the range is the range of the ratios, but at least 5 % to each side, because a single run does
not show how much runs differ. A run that computes the same, but with other ranks or another batch, says only how fast this GPU
computes this model: it scales the computing part, and the range stays as wide as it was, because nothing else was measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from statistics import median
from typing import cast

import msgspec

from jobs.planner import gpu, model_facts
from jobs.planner.step_time import PredictedStepTime
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import PredictedRange, make_exact_range, sum_ranges

CalibrationKey = tuple[object, ...]
PredictedTimes = tuple[float, float]  # the predicted seconds of a step, and of its computing
LEAST_RATIO_SPREAD = 0.05
RUNS_NOUN = "run(s)"
RESULTS_NOUN = "result(s) in docs/results"


class MeasuredRatio(msgspec.Struct, frozen=True):
    """How the measurements of one completed run compare with its prediction."""

    cell: Cell
    gpu_name: str
    """The name of the GPU that the run used."""
    time_ratio: float | None
    """The measured time divided by the predicted time; None if one of the two is not known."""
    memory_ratio: float | None
    """The measured memory divided by the predicted memory; None if one of the two is not known."""
    power_w: float | None = None
    """The power of one GPU in watts while steps were timed; None if the power was not measured."""
    computing_ratio: float | None = None
    """The measured time without the predicted parts that are not computing, divided by the predicted time of computing; None if
    it is not known, or if computing is less than half of the predicted time."""


class Calibration(msgspec.Struct, frozen=True):
    """The measurements that correct predictions: ratios of times and of memory, and the power of a GPU in watts, by key."""

    time_ratios: dict[CalibrationKey, list[float]]
    computing_ratios: dict[CalibrationKey, list[float]]
    memory_ratios: dict[CalibrationKey, list[float]]
    watts_by_key: dict[CalibrationKey, list[float]]
    source_noun: str = RUNS_NOUN
    """A text that says where the measurements come from."""
    fallback: Calibration | None = None
    """Another calibration, used for cells for which this calibration has no measurement."""

    def correct_time(self, cell: Cell, gpu_name: str, step: PredictedStepTime) -> tuple[PredictedRange, str]:
        """Correct the predicted time of a step. Returns (the corrected seconds, a text that says how they were obtained)."""
        if ratios := self.time_ratios.get(_make_step_key(cell, gpu_name)):
            return _narrow_by_ratios(step.step_s, ratios), self._describe_calibration(ratios, "this step")
        compute_s = step.parts_s["compute"]
        for computing_key in _list_computing_keys(cell, gpu_name):
            if ratios := self.computing_ratios.get(computing_key):
                other_parts_s = sum_ranges(
                    {part_name: part_s for part_name, part_s in step.parts_s.items() if part_name != "compute"}
                )
                return other_parts_s + compute_s.times(median(ratios)), self._describe_calibration(
                    ratios, "this model, computing only"
                )
        return (step.step_s, "") if self.fallback is None else self.fallback.correct_time(cell, gpu_name, step)

    def correct_memory(self, cell: Cell, gpu_name: str, predicted_bytes: PredictedRange) -> tuple[PredictedRange, str]:
        """Correct the predicted peak memory. Returns (the corrected memory, a text that says how it was obtained)."""
        if ratios := self.memory_ratios.get(_make_step_key(cell, gpu_name)):
            return _narrow_by_ratios(predicted_bytes, ratios), self._describe_calibration(ratios, "this step")
        if ratios := self.memory_ratios.get(_make_memory_key(cell, gpu_name)):
            return predicted_bytes.times(median(ratios)), self._describe_calibration(ratios, f"this model with {cell.strategy}")
        return (predicted_bytes, "") if self.fallback is None else self.fallback.correct_memory(cell, gpu_name, predicted_bytes)

    def correct_power(self, cell: Cell, gpu_name: str, assumed_watts: PredictedRange) -> tuple[PredictedRange, str]:
        """The power of a GPU. Returns (the measured watts, else `assumed_watts`; a text that says how the watts were
        obtained)."""
        for power_key in _list_power_keys(cell, gpu_name):
            if watts := self.watts_by_key.get(power_key):
                group_name = cell.strategy if power_key == _list_power_keys(cell, gpu_name)[0] else cell.workload
                return _narrow_by_ratios(make_exact_range(1.0), watts), self._describe_calibration(watts, group_name)
        return (assumed_watts, "") if self.fallback is None else self.fallback.correct_power(cell, gpu_name, assumed_watts)

    def _describe_calibration(self, ratios: list[float], measured_thing: str) -> str:
        return f", calibrated by {len(ratios)} {self.source_noun} of {measured_thing}"


NO_CALIBRATION = Calibration({}, {}, {}, {})


def build_calibration(
    ratios: Iterable[MeasuredRatio], source_noun: str = RUNS_NOUN, fallback: Calibration | None = None
) -> Calibration:
    """Build a calibration from the measurements of runs.

    ratios: measured time and memory of runs, divided by the predicted values. source_noun: a text that says where the
    measurements come from. fallback: another calibration, which is used for cells without a measurement in `ratios`."""
    calibration = Calibration({}, {}, {}, {}, source_noun, fallback)
    for ratio in ratios:
        step_key = _make_step_key(ratio.cell, ratio.gpu_name)
        measured_values = (
            (calibration.time_ratios, ratio.time_ratio, [step_key]),
            (calibration.computing_ratios, ratio.computing_ratio, _list_computing_keys(ratio.cell, ratio.gpu_name)),
            (calibration.memory_ratios, ratio.memory_ratio, [step_key, _make_memory_key(ratio.cell, ratio.gpu_name)]),
            (calibration.watts_by_key, ratio.power_w, _list_power_keys(ratio.cell, ratio.gpu_name)),
        )
        for values_by_key, measured_value, calibration_keys in measured_values:
            for calibration_key in calibration_keys if measured_value is not None else ():
                values_by_key.setdefault(calibration_key, []).append(cast("float", measured_value))
    return calibration


def measure_ratio(
    cell: Cell,
    gpu_name: str,
    predicted_times: PredictedTimes,
    measured_s: float | None,
    memory_ratio: float | None,
    power_w: float | None = None,
) -> MeasuredRatio:
    """How a run compares with its prediction. measured_s: the measured seconds of a step; None: not known. memory_ratio,
    power_w: as in MeasuredRatio."""
    step_s, compute_s = predicted_times
    if not measured_s or not step_s:
        return MeasuredRatio(cell, gpu_name, None, memory_ratio, power_w)
    computing_ratio = (measured_s - (step_s - compute_s)) / compute_s if compute_s >= step_s / 2 else 0.0
    return MeasuredRatio(
        cell, gpu_name, measured_s / step_s, memory_ratio, power_w, computing_ratio if computing_ratio > 0 else None
    )


def _make_shape_key(cell: Cell, gpu_name: str) -> CalibrationKey:
    """What determines the operations of a model on a GPU: the kind and the sizes of the model, whatever its name is."""
    facts = model_facts.find_model_facts(cell)
    return _normalize_gpu_name(gpu_name), cell.precision, facts.model_kind, facts.parameters, facts.block_count, facts.width


def _list_computing_keys(cell: Cell, gpu_name: str) -> list[CalibrationKey]:
    """The keys of what a rank computes: with the same batch, and with any batch."""
    computing_key = (*_make_shape_key(cell, gpu_name), cell.tp, cell.pp, cell.activation_checkpointing, cell.compile)
    return [(*computing_key, cell.seq_len, cell.micro_batch_size), computing_key]


def _make_memory_key(cell: Cell, gpu_name: str) -> CalibrationKey:
    return (*_make_shape_key(cell, gpu_name), cell.strategy, cell.activation_checkpointing)


def _make_step_key(cell: Cell, gpu_name: str) -> CalibrationKey:
    """The key of a step: everything that determines its time and its memory."""
    option_values = tuple(sorted((name, str(value)) for name, value in cell.options.items()))
    cell_sizes = (cell.gpus, cell.nnodes, cell.micro_batch_size, cell.gradient_accumulation_steps, cell.optimizer.name)
    return (*_list_computing_keys(cell, gpu_name)[0], cell.strategy, *cell_sizes, option_values)


def _list_power_keys(cell: Cell, gpu_name: str) -> list[CalibrationKey]:
    shape_key = _make_shape_key(cell, gpu_name)
    return [(*shape_key, cell.strategy), shape_key]


@functools.cache
def _normalize_gpu_name(gpu_name: str) -> str:
    """Convert the different names of a GPU model to one text. For example, a cluster file may write `a100` for a GPU that NVML
    calls NVIDIA A100-SXM4-40GB."""
    model = gpu.find_gpu_model(gpu_name)
    return gpu_name if model is None else model.name


def _narrow_by_ratios(predicted_range: PredictedRange, ratios: list[float]) -> PredictedRange:
    """The likely value, multiplied by the median of the ratios, with the range of the ratios."""
    median_ratio = median(ratios)
    lowest_ratio = min(*ratios, median_ratio * (1 - LEAST_RATIO_SPREAD))
    highest_ratio = max(*ratios, median_ratio * (1 + LEAST_RATIO_SPREAD))
    return PredictedRange(
        predicted_range.likely * lowest_ratio, predicted_range.likely * median_ratio, predicted_range.likely * highest_ratio
    )
