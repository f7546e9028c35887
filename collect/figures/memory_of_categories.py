"""Draws the memory of each category over several steps, with a panel per category and a line per cell, as figures 12 to 14 of
study 5."""

from __future__ import annotations

from typing import Any

from collect import notation
from collect.drawing.panels import PANEL_PX, stacked_layout, y_axis_name
from collect.figure import Figure, Group, order_by_visibility, thin_points
from collect.figures.memory_timeline import CATEGORIES, category_label
from collect.sources.memory import MemoryCurves

NAME = "memory_of_categories"


def draw(group: Group) -> Figure | None:
    """One line per panel for each cell whose first completed repeat recorded the memory of rank 0 over more than one step."""
    curves_of_cells: dict[str, MemoryCurves] = {}
    for mark in group.marks:
        curves = mark.cell.completed[0].memory if mark.cell.completed else None
        if curves is not None and curves.steps > 1:
            curves_of_cells[mark.label] = curves
    panels = [name for name in CATEGORIES if any(any(curves.points.get(name, ())) for curves in curves_of_cells.values())]
    if not panels:
        return None
    unit, size = notation.bytes_unit(
        [max(curves.points[name]) for curves in curves_of_cells.values() for name in curves.points]
    )
    visible_marks = order_by_visibility([mark for mark in group.marks if mark.label in curves_of_cells])
    data: list[dict[str, Any]] = []
    for number, name in enumerate(panels, 1):
        for mark, visible in visible_marks:
            curves = curves_of_cells[mark.label]
            x, y = thin_points([t_ms / 1000 for t_ms in curves.t_ms], curves.points.get(name, [0] * len(curves.t_ms)))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": mark.label,
                    "meta": mark.row.id,
                    "legendgroup": mark.label,
                    "showlegend": number == 1,
                    "x": [float(f"{moment:.5g}") for moment in x],
                    "y": [None if value is None else float(f"{value / size:.4g}") for value in y],
                    "yaxis": y_axis_name(number),
                    "line": mark.look.line | {"width": 1.5, "shape": "hv"},
                    "visible": visible,
                    "hovertemplate": f"%{{y:.4~g}} {unit} at %{{x:.4~g}} s",
                }
            )
    steps = " or ".join(str(steps) for steps in sorted({curves.steps for curves in curves_of_cells.values()}))
    caption = (
        f"{steps} consecutive steps on rank 0, recorded by the instrument `memory: categories` with `memory_steps`. First "
        "completed repeat of each cell. The time between steps is in the curves, and following the memory slows steps down."
    )
    titles = [f"{category_label(name).capitalize()} ({unit})" for name in panels]
    height_px = 60 + 22 * len(visible_marks) + PANEL_PX * len(panels)
    figure_layout = stacked_layout(titles, "s since the first of these steps began")
    return Figure(NAME, "Memory of each category over steps", caption, height_px, data, figure_layout)
