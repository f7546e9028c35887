"""Draws the utilization of GPUs, GPU memory and processors for each cell, as in study 3 (sections 5.1.2, 5.1.3)."""

from __future__ import annotations

from typing import Any

from collect.drawing.panel_rows import rows
from collect.figure import INK, Figure, Group, error_bar, rows_height_px, rows_layout, state_trace

# (metric, its name in the legend, symbol of its marks). The row in which a mark lies shows the cell.
MARKS = (
    ("gpu_pct", "GPUs busy", "circle-open"),
    ("gpu_memory_pct", "GPU memory in use, maximum", "square-open"),
    ("cpu_pct", "processors busy", "diamond-open"),
)
KEY_PX = 66  # height of the legend, which has up to three lines on a phone


def draw(group: Group) -> Figure | None:
    """Draw one mark with its interval for each cell and each of the three metrics, in percent of the capacity.

    None if no cell has a metric of GPUs: the table and the figure `telemetry` already show the processors.
    """
    measured = [entry for entry in MARKS if any(entry[0] in mark.row.metrics for mark in group.marks)]
    if all(name == "cpu_pct" for name, _, _ in measured):
        return None
    has_value = [mark.row.n > 0 or any(name in mark.row.metrics for name, _, _ in measured) for mark in group.marks]
    data = [state_trace(group, has_value)]  # the row of a cell that completed, but has no telemetry, stays empty
    data[0]["showlegend"] = False
    for name, legend_name, symbol in measured:
        data.append(_legend_entry(legend_name, symbol))
        for mark in group.marks:
            if estimate := mark.row.metrics.get(name):
                data.append(
                    {
                        "type": "scatter",
                        "mode": "markers",
                        "x": [estimate.value],
                        "y": [mark.label],
                        "meta": mark.row.id,
                        "error_x": error_bar(estimate, mark.look.colour),
                        "marker": {
                            "color": mark.look.colour,
                            "symbol": symbol,
                            "size": 10,
                            "line": {"width": 2, "color": mark.look.colour},
                        },
                        "legendgroup": legend_name,
                        "showlegend": False,
                        "hovertemplate": f"{legend_name}: %{{x:.3~g}} %, n = {estimate.n}<extra>%{{y}}</extra>",
                    }
                )
    caption = (
        "While steps were timed. GPUs: mean over the GPUs of the run. GPU memory: the highest share of any of these GPUs. "
        "Processors: mean over all processors of the hosts. Means over repeats with their 95 % intervals."
    )
    frame = rows_layout(group, "%") | {"showlegend": True}
    frame["xaxis"] |= {"range": [-2, 102]}
    return rows(Figure("utilization", "Utilization", caption, rows_height_px(group) + KEY_PX, data, frame), group.marks)


def _legend_entry(name: str, symbol: str) -> dict[str, Any]:
    """The entry of the legend that explains a symbol. Its colour is neutral: no cell has this colour."""
    marker = {"color": INK, "symbol": symbol, "size": 10, "line": {"width": 2}}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "legendgroup": name, "marker": marker}
