"""Scores the planner: compares its predictions with the measurements, for each strategy and category (such as step time)."""

from __future__ import annotations

from statistics import fmean, median

import msgspec

from collect.metrics.energy import measure_energy
from collect.metrics.prediction_score import ComparedPrediction, compare_predictions
from collect.reading.load import LoadedMatrix

# A prediction by arithmetic has no range. It may leave out this share of the value, such as an optimizer's counters of steps.
TOLERANCE = 0.001


class PredictionScore(msgspec.Struct, kw_only=True):
    """One strategy and category, over all completed runs that have both a prediction and a measurement.

    A ratio is a measured number divided by the likely predicted number.
    """

    strategy: str
    """Name of the strategy."""
    category: str
    """Step time, memory (also by category of tensors), traffic or energy."""
    unit: str
    """Unit of `predicted` and `measured`, which are for one step: s, bytes or J."""
    n: int
    """Number of runs."""
    predicted: float | None = None
    """The median of the predicted values over the runs; null if the runs are of several workloads, because their sizes have
    nothing in common."""
    measured: float | None = None
    """The median of the measured values over the runs; null as for `predicted`."""
    ratio: float
    """Median of the ratios of the runs."""
    ratio_low: float
    """The lowest ratio of a run."""
    ratio_high: float
    """The highest ratio of a run."""
    error_pct: float
    """Mean over the runs of how far a measurement is from its likely prediction, in percent of the prediction."""
    within: int
    """Number of runs whose measurement is in the predicted range, or at most 0.1 % outside of it."""


def score_predictions(loaded: LoadedMatrix) -> list[PredictionScore]:
    """The scores of all strategies in the order of the matrix; for each strategy, one score per category."""
    pairs: dict[str, dict[str, list[ComparedPrediction]]] = {}
    workloads_by_strategy: dict[str, set[str]] = {}
    for cell in loaded.cells:
        for run in cell.completed_runs:
            for comparison in compare_predictions(run):
                pairs.setdefault(cell.cell.strategy, {}).setdefault(comparison.category, []).append(comparison)
                workloads_by_strategy.setdefault(cell.cell.strategy, set()).add(cell.cell.workload)
    return [
        _score_category(strategy, category, comparisons, has_sizes=len(workloads_by_strategy[strategy]) == 1)
        for strategy, comparisons_by_category in pairs.items()
        for category, comparisons in comparisons_by_category.items()
    ]


def compute_watts_per_gpu(loaded: LoadedMatrix) -> dict[str, float]:
    """The mean power of one GPU in each completed run while its steps were timed: {run id: power in watts}.

    Rehearsals and runs whose energy was not measured are left out.
    """
    watts_by_run = {}
    for run in loaded.runs:
        if not run.completed or run.result is None or run.is_rehearsal or (timed_window := run.timed_window) is None:
            continue
        if (energy_quantity := measure_energy(run)) is not None and timed_window[1] > timed_window[0]:
            watts_by_run[run.run_id] = energy_quantity.value / (timed_window[1] - timed_window[0]) / run.cell.gpus
    return watts_by_run


def _score_category(strategy: str, category: str, comparisons: list[ComparedPrediction], *, has_sizes: bool) -> PredictionScore:
    measured_ratios = [comparison.measured / comparison.predicted.likely for comparison in comparisons]
    return PredictionScore(
        strategy=strategy,
        category=category,
        unit=comparisons[0].unit,
        n=len(comparisons),
        predicted=median(comparison.predicted.likely for comparison in comparisons) if has_sizes else None,
        measured=median(comparison.measured for comparison in comparisons) if has_sizes else None,
        ratio=median(measured_ratios),
        ratio_low=min(measured_ratios),
        ratio_high=max(measured_ratios),
        error_pct=100 * fmean(abs(ratio - 1) for ratio in measured_ratios),
        within=sum(_is_within_range(comparison) for comparison in comparisons),
    )


def _is_within_range(comparison: ComparedPrediction) -> bool:
    return (1 - TOLERANCE) * comparison.predicted.low <= comparison.measured <= (1 + TOLERANCE) * comparison.predicted.high
