"""Draws panels of lines one below the other, all with the same time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collect.drawing.axes import LEGEND_HEIGHT_PX, make_axis, make_layout, make_panel_title, name_axis
from collect.drawing.curves import Curve
from collect.drawing.traces import make_points
from collect.figure import MAX_MARKED, MUTED, Figure
from collect.strategy_style import Look

PANEL_PX = 150
PANEL_TITLE_SHARE = 0.24  # share of the height of a panel that its title needs


def draw_curves(
    curve_by_key: Mapping[str, Curve], unit_size: float, look_by_key: Mapping[str, Look], has_marks: bool = False
) -> dict[str, dict[str, Any]]:
    """The lines of a panel: {key of a curve: trace}, without curves that have fewer than two known values.

    unit_size: the size of the panel's unit, by which the values are divided. look_by_key: key of a curve -> its look.
    has_marks: whether long lines have a few marks too, which tell their looks apart.
    """
    trace_by_key = {}
    for key, curve in curve_by_key.items():
        # The values are rounded to the digits that a reader can see.
        rounded_values = [None if value is None else float(f"{value / unit_size:.4g}") for value in curve.values]
        if sum(value is not None for value in rounded_values) > 1:
            is_short = len(rounded_values) <= MAX_MARKED
            mode, marker = "lines+markers" if is_short or has_marks else "lines", look_by_key[key].marks(4)
            points = {"type": "scatter", "x0": round(curve.first_s, 4), "dx": round(curve.width_s, 4), "y": rounded_values}
            line_style = {"mode": mode, "marker": marker if is_short else look_by_key[key].sparse_marks}
            trace_by_key[key] = points | line_style | {"connectgaps": False, "hovertemplate": "%{y:.4~g} at %{x:.1f} s"}
    return trace_by_key


def draw_panels(
    name: str,
    title: str,
    caption: str,
    panels: Sequence[tuple[str, Mapping[str, dict[str, Any]]]],
    style_by_key: Mapping[str, dict[str, Any]],
    time_title: str = "s since the end of the first timed step",
) -> Figure:
    """Draw panels of lines, with one entry in the legend for the lines of the same key in all panels.

    panels: for each panel, its title and its lines, {key of a line: trace}. style_by_key: {key of a line: what is the same in
    all panels, such as its name and its look}, in the order of the legend. time_title: the title of the time axis.
    """
    traces: list[dict[str, Any]] = []
    legend_keys: set[str] = set()
    for panel_number, (_, trace_by_key) in enumerate(panels, 1):
        for key in (key for key in style_by_key if key in trace_by_key):
            axis_settings = {"yaxis": name_axis("y", panel_number), "legendgroup": key, "showlegend": key not in legend_keys}
            traces.append(trace_by_key[key] | style_by_key[key] | axis_settings)
            legend_keys.add(key)
    # Without a visible trace in a panel, plotly computes no place for the axis of the panel, and reports an error.
    visible_axes = {trace["yaxis"] for trace in traces if trace.get("visible") != "legendonly"}
    for y_axis_name in dict.fromkeys(trace["yaxis"] for trace in traces):
        if y_axis_name not in visible_axes:
            traces.append(make_points("lines", [None], [None], showlegend=False, hoverinfo="skip", yaxis=y_axis_name))
    height_px = 60 + min(22 * len(legend_keys), LEGEND_HEIGHT_PX) + PANEL_PX * len(panels)
    return Figure(name, title, caption, height_px, traces, _make_stacked_layout([heading for heading, _ in panels], time_title))


def _make_stacked_layout(titles: list[str], time_title: str) -> dict[str, Any]:
    """The layout of panels one below the other with one time axis, and a dotted line at the start of the time."""
    layout = make_layout(make_axis(time_title, anchor=name_axis("y", len(titles)), showgrid=False), {}, showlegend=True)
    layout["annotations"] = []
    zero_line = {"type": "line", "xref": "x", "x0": 0, "x1": 0, "y0": 0, "y1": 1}
    zero_line |= {"line": {"color": MUTED, "width": 1, "dash": "dot"}}
    layout["shapes"] = [zero_line | {"yref": f"{name_axis('y', number)} domain"} for number in range(1, len(titles) + 1)]
    for number, title in enumerate(titles, 1):
        add_panel(layout, number, title, 1 - number / len(titles), 1 - (number - 1 + PANEL_TITLE_SHARE) / len(titles))
    return layout


def add_panel(layout: dict[str, Any], axis_number: int, title: str, bottom: float, top: float) -> None:
    """Add the y axis of a panel and the title above the panel to a layout. axis_number: the number of the axis, from 1."""
    y_axis = make_axis("", domain=[bottom, top], rangemode="tozero", nticks=4, tickformat=",.3~r", anchor="x")
    layout[name_axis("yaxis", axis_number)] = y_axis
    layout["annotations"].append(make_panel_title(title, top))
