"""Lays out panels of curves, one below the other, over the same time axis."""

from __future__ import annotations

from typing import Any

from collect.figure import MUTED, axis, layout
from collect.figures.drawing.curves import Curve

PANEL_PX = 150
GAP = 0.24  # share of a panel's height for its title


def scaled(curve: Curve, scale: float) -> Curve:
    """A curve with its values divided by `scale`, the unit of the panel, and rounded to the digits that a reader can see."""
    return curve._replace(values=[None if value is None else float(f"{value / scale:.4g}") for value in curve.values])


def is_a_line(curve: Curve) -> bool:
    """Whether a curve has two values or more."""
    return sum(value is not None for value in curve.values) > 1


def stacked(titles: list[str], time: str = "s since the end of the first timed step") -> dict[str, Any]:
    """A layout with one panel per title, one below the other, over the same time axis. Each title is above its panel. A dotted
    line is at the start of the time.

    time: the title of the time axis.
    """
    x = axis(time, anchor=y_axis(len(titles)), showgrid=False)
    shape = layout(x, {}, showlegend=True)
    shape["annotations"] = []
    start = {
        "type": "line",
        "xref": "x",
        "x0": 0,
        "x1": 0,
        "y0": 0,
        "y1": 1,
        "line": {"color": MUTED, "width": 1, "dash": "dot"},
    }
    shape["shapes"] = [start | {"yref": f"{y_axis(number)} domain"} for number in range(1, len(titles) + 1)]
    for number, title in enumerate(titles, 1):
        top, bottom = 1 - (number - 1 + GAP) / len(titles), 1 - number / len(titles)
        panel = axis("", domain=[bottom, top], rangemode="tozero", nticks=4, tickformat=",.3~r", anchor="x")
        shape[y_axis(number).replace("y", "yaxis")] = panel
        at = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
        shape["annotations"].append(at | {"text": title, "showarrow": False, "font": {"size": 12, "color": MUTED}})
    return shape


def y_axis(number: int) -> str:
    """Plotly's name of the y axis with this number, from 1."""
    return "y" if number == 1 else f"y{number}"
