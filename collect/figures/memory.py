"""Draws the peak memory of each cell, measured on the rank that needs the most memory."""

from __future__ import annotations

from collect import notation
from collect.drawing.panel_rows import rows
from collect.figure import INK, Figure, Group, rows_height_px, rows_layout, state_trace

NAME = "peak_memory_bytes"


def draw(group: Group) -> Figure | None:
    """Draw one bar per cell. The bar starts at 0, and its value is written at its end."""
    estimates = [mark.row.metrics.get(NAME) for mark in group.marks]
    kinds = sorted({estimate.kind for estimate in estimates if estimate})
    if not kinds:
        return None
    unit, size = notation.bytes_unit([estimate.value for estimate in estimates if estimate])
    data = [state_trace(group, [estimate is not None for estimate in estimates])]
    for mark, estimate in zip(group.marks, estimates, strict=True):
        if estimate:
            value = estimate.value / size
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "x": [value],
                    "y": [mark.label],
                    "meta": mark.row.id,
                    "text": [notation.format_number(value, 3)],
                    "textposition": "outside",
                    "textfont": {"color": INK, "size": 12},
                    "cliponaxis": False,
                    "marker": {"color": mark.look.colour},
                    "width": 0.45,
                    "hovertemplate": f"%{{x:,.4~g}} {unit}, {estimate.kind}<extra>%{{y}}</extra>",
                }
            )
    caption = f"Highest over ranks and timed steps, mean over repeats: {' or '.join(kinds)}."
    figure_layout = rows_layout(group, unit)
    figure_layout["margin"]["r"] = 56
    return rows(Figure(NAME, "Peak memory", caption, rows_height_px(group), data, figure_layout), group.marks)
