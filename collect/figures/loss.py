"""Draws the loss over the steps. The lines of strategies that do the same work should lie on each other."""

from __future__ import annotations

from typing import Any

from collect.drawing import small_multiples
from collect.figure import Figure, Group, axis, layout, max_points_per_line, order_by_visibility, thin_points


def draw(group: Group) -> Figure | None:
    """Draw one line per cell, from the cell's first completed repeat."""
    data: list[dict[str, Any]] = []
    marks = [mark for mark in group.marks if mark.cell.completed]
    for mark, visible in order_by_visibility(marks):
        world = mark.cell.completed[0].world
        x, y = thin_points(world["step"].to_list(), world["loss"].to_list(), max_points_per_line(len(marks)))
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": mark.label,
                "meta": mark.row.id,
                "x": x,
                "y": y,
                "line": mark.look.line,
                "marker": mark.look.sparse_marks,
                "visible": visible,
                "hovertemplate": "%{y:.5~g} at step %{x}",
            }
        )
    caption = "Mean over the global batch at each timed step, before its update; the first completed repeat of each cell."
    figure_layout = layout(axis("step", showgrid=False), axis("loss"), showlegend=True)
    if not data:
        return None
    return small_multiples.lines(Figure("loss", "Loss", caption, 380, data, figure_layout), small_multiples.divide_cells(marks))
