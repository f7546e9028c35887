"""Draws the time of each epoch, and the mean time of all epochs so far: the first epochs are often slower."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from collect.drawing import small_multiples
from collect.figure import Figure, Group, axis, layout, max_points_per_line, order_by_visibility, thin_points

MOST_TICKS = 10


def draw(group: Group) -> Figure | None:
    """Draw a dot for each epoch, and a line for the mean of all epochs so far, for each cell that has epochs.

    The epochs are those of the cell's first completed repeat.
    """
    data: list[dict[str, Any]] = []
    results = {mark.label: mark.cell.completed[0].result for mark in group.marks if mark.cell.completed}
    epochs = {label: result.epoch_time_s for label, result in results.items() if result and result.epoch_time_s}
    marks = [mark for mark in group.marks if mark.label in epochs]
    for mark, visible in order_by_visibility(marks):
        times = epochs[mark.label]
        epoch_numbers = [float(number) for number in range(1, len(times) + 1)]
        averages = [total / number for total, number in zip(accumulate(times), epoch_numbers, strict=True)]
        shared = {"type": "scatter", "name": mark.label, "legendgroup": mark.label, "meta": mark.row.id, "visible": visible}
        for mode, values in (("markers", times), ("lines", averages)):
            x, y = thin_points(epoch_numbers, values, max_points_per_line(2 * len(epochs)))
            data.append(
                {
                    **shared,
                    "mode": mode,
                    "x": x,
                    "y": y,
                    "showlegend": mode == "lines",
                    "line": mark.look.line,
                    "marker": mark.look.marks(4) | {"opacity": 0.45},
                    "hovertemplate": f"%{{y:.4~g}} s, {'epoch' if mode == 'markers' else 'mean of epochs up to'} %{{x}}",
                }
            )
    caption = (
        "Dots: the time of an epoch, as the sum of the step times of the slowest rank in each step. Lines: the mean of all "
        "epochs so far. First completed repeat of each cell."
    )
    longest = max(map(len, epochs.values()), default=1)
    tick_settings = {"dtick": 1} if longest <= MOST_TICKS else {}  # else plotly would write fractions such as 1.5
    frame = layout(axis("epoch", showgrid=False, **tick_settings), axis("seconds", rangemode="tozero"), showlegend=True)
    if not data:
        return None
    figure = Figure("epoch_time", "Time of an epoch", caption, 380, data, frame)
    return small_multiples.lines(figure, small_multiples.divide_cells(marks))
