"""Draws the validation accuracy over the training time, which shows whether a cell with faster steps is accurate earlier."""

from __future__ import annotations

from typing import Any

from collect.drawing import small_multiples
from collect.figure import Figure, Group, axis, layout, order_by_visibility
from collect.loading.loaded_run import LoadedRun
from collect.sources.steps import seconds_until


def draw(group: Group) -> Figure | None:
    """Draw one line for each cell that has validation results. The results are those of the cell's first completed repeat."""
    data: list[dict[str, Any]] = []
    points = {mark.label: _validation_points(mark.cell.completed[0]) for mark in group.marks if mark.cell.completed}
    marks = [mark for mark in group.marks if points.get(mark.label)]
    for mark, visible in order_by_visibility(marks):
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": mark.label,
                "meta": mark.row.id,
                "x": [seconds for seconds, _ in points[mark.label]],
                "y": [accuracy for _, accuracy in points[mark.label]],
                "line": mark.look.line,
                "marker": mark.look.marks(7),
                "visible": visible,
                "hovertemplate": "%{y:.3~g} % after %{x:.3~g} s",
            }
        )
    caption = (
        "Share of correct predictions on the validation split, over the training time: the sum of the slowest rank's step "
        "times, without warm-up steps and without the validation itself. First completed repeat of each cell."
    )
    frame = layout(axis("seconds of training", showgrid=False), axis("accuracy, %", rangemode="tozero"), showlegend=True)
    if not data:
        return None
    figure = Figure("accuracy", "Validation accuracy", caption, 380, data, frame)
    return small_multiples.lines(figure, small_multiples.divide_cells(marks))


def _validation_points(run: LoadedRun) -> list[tuple[float, float]]:
    """(seconds of training, accuracy in percent) for each validation of a run whose steps up to the validation are all
    recorded.

    Empty if the run was suspended, because the training time of a suspended run is not known.
    """
    if run.paused:
        return []
    seconds = seconds_until(run.timed)
    return [(seconds[record.step], 100 * record.accuracy) for record in run.validation if record.step in seconds]
