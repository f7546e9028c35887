"""Compares the planner's predictions with the measurements. `jobs submit` stores a prediction in the folder of each run."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn
from shardlab import prediction


def step_over_prediction(run: LoadedRun) -> Quantity | None:
    """The median step time divided by the likely predicted step time.

    None if no step time was predicted, or if the run is a rehearsal.
    """
    spread = run.result.step_time_ms if run.result is not None and not run.result.rehearsal else None
    predicted = prediction.read(run.folder.path)
    if spread is None or predicted is None or predicted.step_s is None or not predicted.step_s.likely:
        return None
    return Quantity(spread.median / 1000 / predicted.step_s.likely, "x")


def memory_over_prediction(run: LoadedRun) -> Quantity | None:
    """The peak memory that the GPU allocator counted, divided by the likely predicted peak of tensors.

    None if either of them is not known.
    """
    peak = (run.result.peak_memory_bytes or {}).get("allocated") if run.result is not None else None
    predicted = prediction.read(run.folder.path)
    if not peak or predicted is None or predicted.tensor_bytes is None:
        return None
    if predicted.formula_tensor_bytes is None and predicted.memory_from != "rehearsal":
        return None  # the formula gave a lower bound only
    return Quantity(peak / predicted.tensor_bytes.likely, "x")


METRICS = (
    Metric(
        name="step_time_over_prediction",
        column=MetricColumn("times", 190, "Step / predicted", 3),
        unit="x",
        direction="neither",
        definition="Median step time divided by the step time that the planner predicted before the run was submitted "
        "(docs/planner.md).",
        of_run=step_over_prediction,
    ),
    Metric(
        name="memory_over_prediction",
        column=MetricColumn("memory", 95, "Peak / predicted", 3),
        unit="x",
        direction="neither",
        definition="Peak that torch's allocator counted on the GPU divided by the peak of tensors that the planner predicted "
        "before the run was submitted (docs/planner.md).",
        of_run=memory_over_prediction,
    ),
)
