"""Compares the planner's predictions with the measurements. `jobs submit` stores a prediction in the folder of each run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.metric_values import read_result_value
from collect.metrics.energy import measure_energy
from shardlab.runs.prediction import PredictedRange, Prediction, make_exact_range

STEP_TIME, MEMORY, TRAFFIC, ENERGY = "step time", "memory", "traffic", "energy"
# unit of a category, whose numbers are for one step
UNIT_BY_CATEGORY = {STEP_TIME: "s", MEMORY: "bytes", TRAFFIC: "bytes", ENERGY: "J"}
JOULES_PER_KWH = 3.6e6


class ComparedPrediction(NamedTuple):
    """One predicted number of a run and its measurement, in the same unit."""

    category: str
    """STEP_TIME, MEMORY, `memory: CATEGORY`, TRAFFIC or ENERGY."""
    unit: str
    """S, bytes or J."""
    predicted: PredictedRange
    measured: float


def compare_predictions(run: LoadedRun) -> Iterator[ComparedPrediction]:
    """Compare each predicted number of a run with its measurement, if the run has one. Yields nothing if there is no
    prediction."""
    prediction = run.predicted
    if prediction is None or run.result is None or run.run is None:
        return
    for category, unit in UNIT_BY_CATEGORY.items():
        named_pairs = [(category, _PAIR_FUNCTION_BY_CATEGORY[category](run, prediction))]
        if category == MEMORY:
            named_pairs += [
                (f"{MEMORY}: {name}", category_pair) for name, category_pair in _pair_memory_by_category(run, prediction)
            ]
        for name, pair in named_pairs:
            if pair is not None and pair[0].likely > 0:
                yield ComparedPrediction(name, unit, *pair)


def _pair_step_times(run: LoadedRun, prediction: Prediction) -> tuple[PredictedRange, float] | None:
    """Returns (predicted step time, measured median step time), in seconds. None for rehearsals, whose times are not
    results."""
    assert run.result is not None
    step_times = None if run.is_rehearsal else run.result.step_time_ms
    return None if step_times is None or prediction.step_s is None else (prediction.step_s, step_times.median / 1000)


def _pair_memory(run: LoadedRun, prediction: Prediction) -> tuple[PredictedRange, float] | None:
    """Returns (predicted memory of tensors, measured peak of the memory that the GPU allocator had allocated), in bytes."""
    assert run.result is not None
    peak_bytes = read_result_value(run, "peak_memory_bytes.allocated")
    if not peak_bytes or prediction.tensor_bytes is None:
        return None
    if prediction.formula_tensor_bytes is None and prediction.memory_from != "rehearsal":
        return None  # the prediction is only a lower bound, which a measurement can exceed
    return prediction.tensor_bytes, peak_bytes


def _pair_memory_by_category(run: LoadedRun, prediction: Prediction) -> Iterator[tuple[str, tuple[PredictedRange, float]]]:
    """Yields (category, (predicted, measured memory of this category at the peak of a step)), in bytes.

    Yields nothing if the instrument `memory: categories` was off.
    """
    assert run.result is not None
    peak_bytes_by_category = run.result.instruments.get("memory", {}).get("peak_bytes", {})
    for category, predicted_range in prediction.memory_by_category.items():
        measured_bytes = peak_bytes_by_category.get(category)
        if isinstance(measured_bytes, int | float):
            yield category, (predicted_range, float(measured_bytes))


def _pair_traffic(run: LoadedRun, prediction: Prediction) -> tuple[PredictedRange, float] | None:
    """Returns (predicted bytes that all ranks send in a step, bytes counted from the collectives of a step).

    The planner predicts the bytes of the rank that sends most. In a pipeline, other ranks send less, so the result is None for
    a pipeline.
    """
    assert run.result is not None
    assert run.run is not None
    counted_bytes = read_result_value(run, "communication_bytes.counted")
    if counted_bytes is None or prediction.sent_bytes is None or (run.run.cell.pp or 1) > 1:
        return None
    return make_exact_range(prediction.sent_bytes * run.run.world.world_size), counted_bytes


def _pair_energy(run: LoadedRun, prediction: Prediction) -> tuple[PredictedRange, float] | None:
    """Returns (predicted energy of a step, measured energy of a step), in joules.

    The predicted energy of a step is the predicted power of the run times the predicted time of a step.
    """
    energy = measure_energy(run)
    steps = run.world_steps.height - 1  # the measurement starts at the end of the first timed step
    if energy is None or steps < 1 or prediction.energy_kwh is None or prediction.time_s is None or prediction.step_s is None:
        return None
    run_s, run_kwh, step_s = prediction.time_s, prediction.energy_kwh, prediction.step_s
    low_j, likely_j, high_j = (
        JOULES_PER_KWH * kwh / run_time_s * step_time_s
        for kwh, run_time_s, step_time_s in (
            (run_kwh.low, run_s.low, step_s.low),
            (run_kwh.likely, run_s.likely, step_s.likely),
            (run_kwh.high, run_s.high, step_s.high),
        )
    )
    return PredictedRange(low_j, likely_j, high_j), energy.value / steps


def divide_by_prediction(run: LoadedRun, category: str) -> Quantity | None:
    """The measured number of a category divided by the likely predicted number."""
    prediction = run.predicted
    if prediction is None or run.result is None or run.run is None:
        return None
    pair = _PAIR_FUNCTION_BY_CATEGORY[category](run, prediction)
    return None if pair is None or pair[0].likely <= 0 else Quantity(pair[1] / pair[0].likely, "x")


_PAIR_FUNCTION_BY_CATEGORY = {STEP_TIME: _pair_step_times, MEMORY: _pair_memory, TRAFFIC: _pair_traffic, ENERGY: _pair_energy}
_make_score_metric = partial(Metric, unit="x", direction="neither")
METRICS = (
    _make_score_metric(
        name="step_time_over_prediction",
        column=MetricColumn("times", 190, "Step / predicted", 3),
        definition="Median step time divided by the step time that the planner predicted before the run was submitted "
        "(docs/planner.md).",
        of_run=lambda run: divide_by_prediction(run, STEP_TIME),
        reads=Reads(prediction=("step_s.likely",), result=("step_time_ms.median", "rehearsal", "gpus"), events=True),
    ),
    _make_score_metric(
        name="memory_over_prediction",
        column=MetricColumn("memory", 95, "Peak / predicted", 3),
        definition="Peak that torch's allocator counted on the GPU divided by the peak of tensors that the planner "
        "predicted before the run was submitted (docs/planner.md).",
        of_run=lambda run: divide_by_prediction(run, MEMORY),
        reads=Reads(
            prediction=("tensor_bytes.likely", "formula_tensor_bytes", "memory_from"), result=("peak_memory_bytes.allocated",)
        ),
    ),
    _make_score_metric(
        name="sent_over_prediction",
        column=MetricColumn("sent", 40, "Counted / predicted", 4),
        definition="Bytes that all ranks sent in one step, counted from its collectives, divided by the bytes that "
        "the planner predicted before the run was submitted (docs/planner.md). Blank for pipelines, whose ranks send "
        "different numbers of bytes.",
        of_run=lambda run: divide_by_prediction(run, TRAFFIC),
        reads=Reads(prediction=("sent_bytes",), result=("communication_bytes.counted",), run=("cell.pp", "world.world_size")),
        exact=True,
    ),
    _make_score_metric(
        name="energy_over_prediction",
        column=MetricColumn("times", 195, "Energy / predicted", 3),
        of_all_steps=True,
        definition="Energy of the GPUs per step divided by the energy per step that the planner predicted before the "
        "run was submitted (docs/planner.md): its power of the GPUs times its time of a step.",
        of_run=lambda run: divide_by_prediction(run, ENERGY),
        reads=Reads(
            steps="timed", samples="window", events=True, prediction=("energy_kwh", "time_s", "step_s"), result=("gpus",)
        ),
    ),
)
