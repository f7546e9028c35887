"""Draws a histogram of the epoch times of each cell: a mean alone would not show if some epochs are much slower than others."""

from __future__ import annotations

from typing import Any

from collect.figure import MOST_SHOWN, CellMark, Figure, Group, axis, layout

MIN_EPOCHS = 5  # the fewest epochs for which a cell gets a histogram
ROW_PX, MARGIN_PX, GAP = 120, 40, 0.4  # GAP: share of a row's height that its label and its axis need


def draw(group: Group) -> Figure | None:
    """Draw one histogram per cell, one below the other, each with its own axis in seconds.

    A histogram counts the epochs of all completed repeats of its cell.
    """
    epoch_times: list[tuple[CellMark, list[float]]] = []
    for mark in group.marks:
        times = [time for run in mark.cell.completed if run.result for time in run.result.epoch_time_s or ()]
        if len(times) >= MIN_EPOCHS:
            epoch_times.append((mark, times))
    if not epoch_times:
        return None
    drawn, left_out_count = epoch_times[:MOST_SHOWN], len(epoch_times) - MOST_SHOWN
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    labels: list[dict[str, Any]] = []
    for row, (mark, times) in enumerate(drawn):
        number = "" if row == 0 else str(row + 1)
        top = 1 - row / len(drawn)
        axes[f"xaxis{number}"] = axis("", showgrid=False, anchor=f"y{number}", nticks=6, ticksuffix=" s")
        axes[f"yaxis{number}"] = axis("epochs", domain=[top - (1 - GAP) / len(drawn), top - 0.18 / len(drawn)], nticks=3)
        labels.append(
            {"text": mark.label, "x": 0, "y": top, "xref": "paper", "yref": "paper", "showarrow": False, "yanchor": "top"}
            | {"xanchor": "left", "font": {"size": 12}}
        )
        data.append(
            {
                "type": "histogram",
                "name": mark.label,
                "meta": mark.row.id,
                "x": times,
                "xaxis": f"x{number}",
                "yaxis": f"y{number}",
                "nbinsx": 30,
                "marker": {"color": mark.look.colour},
                "hovertemplate": "%{y} epochs of %{x} s",
            }
        )
    caption = "Number of epochs by duration, over all completed repeats of a cell. Each cell has its own scale."
    if left_out_count > 0:
        caption += f" {left_out_count} more cells with epochs are not drawn."
    height_px = MARGIN_PX + ROW_PX * len(drawn)
    return Figure("epoch_histogram", "Times of epochs", caption, height_px, data, layout({}, {}, **axes, annotations=labels))
