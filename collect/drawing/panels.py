"""Lays out panels of curves one below the other, all with the same time axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect.drawing.curves import Curve
from collect.figure import MUTED, axis, layout

PANEL_PX = 150
GAP = 0.24  # share of the height of a panel that its title needs


def scale_curve(curve: Curve, scale: float) -> Curve:
    """The curve with values in the unit of the panel, rounded to the digits that a reader can see.

    scale: the size of the panel's unit, by which the values are divided.
    """
    return curve._replace(values=[None if value is None else float(f"{value / scale:.4g}") for value in curve.values])


def is_a_line(curve: Curve) -> bool:
    """Whether a curve has at least two known values, so that a line can be drawn."""
    return sum(value is not None for value in curve.values) > 1


def stacked_layout(titles: list[str], time_title: str = "s since the end of the first timed step") -> dict[str, Any]:
    """The layout of panels one below the other with one time axis, and a dotted line at the start of the time.

    titles: the title of each panel, which is drawn above the panel. time_title: the title of the time axis.
    """
    x = axis(time_title, anchor=y_axis_name(len(titles)), showgrid=False)
    figure_layout = layout(x, {}, showlegend=True)
    figure_layout["annotations"] = []
    zero_line = {
        "type": "line",
        "xref": "x",
        "x0": 0,
        "x1": 0,
        "y0": 0,
        "y1": 1,
        "line": {"color": MUTED, "width": 1, "dash": "dot"},
    }
    figure_layout["shapes"] = [zero_line | {"yref": f"{y_axis_name(number)} domain"} for number in range(1, len(titles) + 1)]
    for number, title in enumerate(titles, 1):
        top, bottom = 1 - (number - 1 + GAP) / len(titles), 1 - number / len(titles)
        panel = axis("", domain=[bottom, top], rangemode="tozero", nticks=4, tickformat=",.3~r", anchor="x")
        figure_layout[y_axis_name(number).replace("y", "yaxis")] = panel
        anchor = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
        figure_layout["annotations"].append(anchor | {"text": title, "showarrow": False, "font": {"size": 12, "color": MUTED}})
    return figure_layout


def invisible_lines(data: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """An invisible trace for each panel in which all lines are hidden when the page opens. Without a visible trace, plotly
    computes no place for the axis of the panel, and reports an error when it draws the axis.

    data: the traces of all panels.
    """
    axes = dict.fromkeys(trace["yaxis"] for trace in data)
    visible_axes = {trace["yaxis"] for trace in data if trace.get("visible") != "legendonly"}
    empty_trace = {"type": "scatter", "mode": "lines", "x": [None], "y": [None], "showlegend": False, "hoverinfo": "skip"}
    return [empty_trace | {"yaxis": name} for name in axes if name not in visible_axes]


def y_axis_name(number: int) -> str:
    """Plotly's name of a y axis. number: the number of the axis, from 1."""
    return "y" if number == 1 else f"y{number}"
