"""Writes how well the planner's predictions match the measurements, as text for the terminal, the page and the exports."""

from __future__ import annotations

from collections.abc import Sequence

from collect.findings.prediction_scores import PredictionScore
from shardlab.terminal import notation

TITLE = "Predictions against measurements, per step"
HEADINGS = ["Strategy", "Category", "n", "Predicted", "Measured", "Ratio", "Ratio from", "Ratio to", "Error (%)", "In range"]
NUMBERS = frozenset(range(2, len(HEADINGS)))  # the indexes of the columns that contain numbers and are aligned to the right
NOTE = (
    "Medians over the runs that have a prediction from before their submission. Predicted and measured are blank if these runs "
    "are of several workloads. Ratio: measured over predicted. Error: the mean distance of a measurement from its likely "
    "prediction. In range: runs whose measurement is in the predicted range, or at most 0.1 % outside of it. Memory by "
    "category: what a category holds when the step needs the most memory; a gradient that does not exist yet, or no longer, "
    "counts as 0."
)


def score_rows(scores: Sequence[PredictionScore]) -> list[list[str]]:
    """The rows of the table of scores: one row for each score, with one text for each column of HEADINGS."""
    return [
        [
            score.strategy,
            score.category,
            str(score.n),
            _size_text(score.predicted, score.unit),
            _size_text(score.measured, score.unit),
            *(notation.format_number(ratio, 3) for ratio in (score.ratio, score.ratio_low, score.ratio_high)),
            notation.format_number(score.error_pct, 2),
            f"{score.within} of {score.n}",
        ]
        for score in scores
    ]


def _size_text(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    scale = 1.0
    if unit == "bytes":
        unit, scale = notation.bytes_unit([value])
    return f"{notation.format_number(value / scale, 3)} {unit}"
