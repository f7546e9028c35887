"""Writes how well the planner's predictions match the measurements, as text for the terminal, the page and the exports."""

from __future__ import annotations

from collections.abc import Sequence

from collect.findings.prediction_scores import PredictionScore
from shardlab.terminal import notation
from shardlab.terminal.table import Column, Table

TITLE = "Predictions against measurements, per step"
NOTE = (
    "Medians over the runs that have a prediction from before their submission. Predicted and measured are blank if these runs "
    "are of several workloads. Ratio: measured over predicted. Error: the mean distance of a measurement from its likely "
    "prediction. In range: runs whose measurement is in the predicted range, or at most 0.1 % outside of it. Memory by "
    "category: what a category holds when the step needs the most memory; a gradient that does not exist yet, or no longer, "
    "counts as 0."
)


def make_score_table(scores: Sequence[PredictionScore]) -> Table[PredictionScore]:
    """The table of scores: one row for each strategy and category."""
    columns: list[Column[PredictionScore]] = [
        Column("Strategy", lambda score: score.strategy, is_number=False),
        Column("Category", lambda score: score.category, is_number=False),
        Column("n", lambda score: score.n),
        Column("Predicted", lambda score: _size_text(score.predicted, score.unit), is_number=True),
        Column("Measured", lambda score: _size_text(score.measured, score.unit), is_number=True),
        Column("Ratio", lambda score: score.ratio, digits=3),
        Column("Ratio from", lambda score: score.ratio_low, digits=3),
        Column("Ratio to", lambda score: score.ratio_high, digits=3),
        Column("Error", lambda score: score.error_pct, "%", digits=2),
        Column("In range", lambda score: f"{score.within} of {score.n}", is_number=True),
    ]
    return Table(TITLE, columns, scores, "predictions", NOTE)


def _size_text(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    scale = 1.0
    if unit == "bytes":
        unit, scale = notation.choose_unit([value])
    return f"{notation.format_number(value / scale, 3)} {unit}".rstrip()
