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
from shardlab.runs.prediction import PredictedRange, exact_range, sum_ranges

Key = tuple[object, ...]
PredictedTimes = tuple[float, float]  # the predicted seconds of a step, and of its computing
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
    computing: float | None = None
    """The measured time without the predicted parts that are not computing, divided by the predicted time of computing; None if
    it is not known, or if computing is less than half of the predicted time."""


class Calibration(msgspec.Struct, frozen=True):
    """The measurements that correct predictions: ratios of times and of memory, and the power of a GPU in watts, by key."""

    times: dict[Key, list[float]]
    computing: dict[Key, list[float]]
    memories: dict[Key, list[float]]
    powers: dict[Key, list[float]]
    whose: str = RUNS
    """A text that says where the measurements come from."""
    fallback: Calibration | None = None
    """Another calibration, used for cells for which this calibration has no measurement."""

    def time(self, cell: Cell, gpu: str, step: PredictedStepTime) -> tuple[PredictedRange, str]:
        """Correct the predicted time of a step. Returns (the corrected seconds, a text that says how they were obtained)."""
        if ratios := self.times.get(_step_key(cell, gpu)):
            return _narrow_by_ratios(step.seconds, ratios), self._describe_calibration(ratios, "this step")
        compute = step.parts["compute"]
        for key in _computing_keys(cell, gpu):
            if ratios := self.computing.get(key):
                rest = sum_ranges({name: part for name, part in step.parts.items() if name != "compute"})
                return rest + compute.times(median(ratios)), self._describe_calibration(ratios, "this model, computing only")
        return (step.seconds, "") if self.fallback is None else self.fallback.time(cell, gpu, step)

    def memory(self, cell: Cell, gpu: str, span: PredictedRange) -> tuple[PredictedRange, str]:
        """Correct the predicted peak memory. Returns (the corrected memory, a text that says how it was obtained)."""
        if ratios := self.memories.get(_step_key(cell, gpu)):
            return _narrow_by_ratios(span, ratios), self._describe_calibration(ratios, "this step")
        if ratios := self.memories.get(_memory_key(cell, gpu)):
            return span.times(median(ratios)), self._describe_calibration(ratios, f"this model with {cell.strategy}")
        return (span, "") if self.fallback is None else self.fallback.memory(cell, gpu, span)

    def power(self, cell: Cell, gpu: str, assumed: PredictedRange) -> tuple[PredictedRange, str]:
        """The power of a GPU. Returns (the measured watts, else `assumed`; a text that says how the watts were obtained)."""
        for key in _power_keys(cell, gpu):
            if watts := self.powers.get(key):
                name = cell.strategy if key == _power_keys(cell, gpu)[0] else cell.workload
                return _narrow_by_ratios(exact_range(1.0), watts), self._describe_calibration(watts, name)
        return (assumed, "") if self.fallback is None else self.fallback.power(cell, gpu, assumed)

    def _describe_calibration(self, ratios: list[float], measured_thing: str) -> str:
        return f", calibrated by {len(ratios)} {self.whose} of {measured_thing}"


NOTHING = Calibration({}, {}, {}, {})


def build_calibration(ratios: Iterable[MeasuredRatio], whose: str = RUNS, fallback: Calibration | None = None) -> Calibration:
    """Build a calibration from the measurements of runs.

    ratios: measured time and memory of runs, divided by the predicted values. whose: a text that says where the measurements
    come from. fallback: another calibration, which is used for cells without a measurement in `ratios`.
    """
    built = Calibration({}, {}, {}, {}, whose, fallback)
    for ratio in ratios:
        step = _step_key(ratio.cell, ratio.gpu)
        measurements = (
            (built.times, ratio.time, [step]),
            (built.computing, ratio.computing, _computing_keys(ratio.cell, ratio.gpu)),
            (built.memories, ratio.memory, [step, _memory_key(ratio.cell, ratio.gpu)]),
            (built.powers, ratio.power_w, _power_keys(ratio.cell, ratio.gpu)),
        )
        for table, value, keys in measurements:
            for key in keys if value is not None else ():
                table.setdefault(key, []).append(cast("float", value))
    return built


def measure_ratio(
    cell: Cell,
    gpu: str,
    predicted_times: PredictedTimes,
    measured_s: float | None,
    memory: float | None,
    power_w: float | None = None,
) -> MeasuredRatio:
    """How a run compares with its prediction. measured_s: the measured seconds of a step; None: not known. memory, power_w: as
    in MeasuredRatio."""
    step_s, compute_s = predicted_times
    if not measured_s or not step_s:
        return MeasuredRatio(cell, gpu, None, memory, power_w)
    computing = (measured_s - (step_s - compute_s)) / compute_s if compute_s >= step_s / 2 else 0.0
    return MeasuredRatio(cell, gpu, measured_s / step_s, memory, power_w, computing if computing > 0 else None)


def _shape_key(cell: Cell, gpu: str) -> Key:
    """What determines the operations of a model on a GPU: the kind and the sizes of the model, whatever its name is."""
    facts = model_facts.find_model_facts(cell)
    return _gpu_model_name(gpu), cell.precision, facts.kind, facts.parameters, facts.blocks, facts.width


def _computing_keys(cell: Cell, gpu: str) -> list[Key]:
    """The keys of what a rank computes: with the same batch, and with any batch."""
    key = (*_shape_key(cell, gpu), cell.tp, cell.pp, cell.activation_checkpointing, cell.compile)
    return [(*key, cell.seq_len, cell.micro_batch_size), key]


def _memory_key(cell: Cell, gpu: str) -> Key:
    return (*_shape_key(cell, gpu), cell.strategy, cell.activation_checkpointing)


def _step_key(cell: Cell, gpu: str) -> Key:
    """The key of a step: everything that determines its time and its memory."""
    options = tuple(sorted((name, str(value)) for name, value in cell.options.items()))
    sizes = (cell.gpus, cell.nnodes, cell.micro_batch_size, cell.gradient_accumulation_steps, cell.optimizer.name)
    return (*_computing_keys(cell, gpu)[0], cell.strategy, *sizes, options)


def _power_keys(cell: Cell, gpu: str) -> list[Key]:
    key = _shape_key(cell, gpu)
    return [(*key, cell.strategy), key]


@functools.cache
def _gpu_model_name(name: str) -> str:
    """Convert the different names of a GPU model to one text. For example, a cluster file may write `a100` for a GPU that NVML
    calls NVIDIA A100-SXM4-40GB."""
    model = gpu.find_gpu_model(name)
    return name if model is None else model.name


def _narrow_by_ratios(span: PredictedRange, ratios: list[float]) -> PredictedRange:
    """The likely value, multiplied by the median of the ratios, with the range of the ratios."""
    middle = median(ratios)
    low, high = min(*ratios, middle * (1 - LEAST_SPREAD)), max(*ratios, middle * (1 + LEAST_SPREAD))
    return PredictedRange(span.likely * low, span.likely * middle, span.likely * high)
