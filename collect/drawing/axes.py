"""Makes plotly's axes and layouts."""

from __future__ import annotations

import math
from typing import Any

from collect.figure import INK, LINE, MUTED, WorkloadGroup

MOST_TICKS = 8  # about the most ticks of an x axis that lists its ticks: at 390 px, more labels would lie on each other
Y_LABELS_PX = 64  # space to the left of a plot, for the tick labels and the title of a numeric y axis
LEGEND_HEIGHT_PX = 132  # a higher legend scrolls; otherwise, on a phone, the legend would leave no room for the figure
ROW_PX, DENSE_ROW_PX, MARGIN_PX = 34, 24, 76  # heights: of a row, of a row in a figure with many rows, of margins
MAX_TALL_ROWS = 16  # a figure with more rows than this uses DENSE_ROW_PX


def name_axis(axis_kind: str, number: int) -> str:
    """Plotly's name of an axis, such as `x2`. axis_kind: `x`, `y`, `xaxis` or `yaxis`. number: the number of the axis, from
    1."""
    return axis_kind if number == 1 else f"{axis_kind}{number}"


def make_panel_title(title_text: str, top: float, **settings: Any) -> dict[str, Any]:
    """The title of a panel, above its left upper corner. top: the upper edge of the panel, as a share of the plots' height."""
    position = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
    return position | {"text": title_text, "showarrow": False, "font": {"size": 12, "color": MUTED}} | settings


def make_axis(title: str, **settings: Any) -> dict[str, Any]:
    """The settings of an axis. title: its title with the unit. settings: plotly's settings that override the defaults."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": MUTED}, "standoff": 8},
        "gridcolor": LINE,
        "linecolor": LINE,
        "zeroline": False,
        "automargin": True,
        "tickfont": {"size": 12, "color": MUTED},
        "fixedrange": True,  # on a phone, a finger must scroll the page and not move the axis
    } | settings


def thin_ticks(x_axis: dict[str, Any], max_ticks: int = MOST_TICKS) -> dict[str, Any]:
    """The x axis without listed ticks that are nearer to the tick before them than the axis divided by `max_ticks`."""
    if "tickvals" not in x_axis:
        return x_axis
    ticks = sorted(x_axis["tickvals"])
    positions = [math.log(tick_value) if x_axis.get("type") == "log" else tick_value for tick_value in ticks]
    indexes: list[int] = []
    for index in range(len(ticks)):
        if not indexes or positions[index] - positions[indexes[-1]] >= 0.999 * (positions[-1] - positions[0]) / max_ticks:
            indexes.append(index)
    return x_axis | {"tickvals": [ticks[index] for index in indexes], "ticktext": [f"{ticks[index]:g}" for index in indexes]}


def make_layout(x_axis: dict[str, Any], y_axis: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The layout of a figure with these axes: no background, no frame, and margins only as large as the labels need.

    settings: other settings of plotly, which override the defaults.
    """
    left_px = 8
    if settings.get("showlegend") and y_axis.get("automargin") and y_axis.get("type") != "category":
        # plotly chooses the ticks of a y axis from the height of the plot. The height depends on the number of lines in the
        # legend, and this number depends on the width that the tick labels leave. If the margin also depended on the labels,
        # plotly might never finish, so the margin is fixed.
        left_px, y_axis = Y_LABELS_PX, y_axis | {"automargin": False}
        settings |= {name: axis | {"automargin": False} for name, axis in settings.items() if name.startswith("yaxis")}
    return {
        "xaxis": x_axis,
        "yaxis": y_axis,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        "margin": {"l": left_px, "r": 16, "t": 8, "b": 44, "pad": 4},
        "hoverlabel": {"bgcolor": "var(--raised)", "bordercolor": LINE, "font": {"color": INK, "size": 12}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12}}
        | {"maxheight": LEGEND_HEIGHT_PX},
        "showlegend": False,
        "dragmode": False,
    } | settings


def make_rows_layout(group: WorkloadGroup, x_title: str) -> dict[str, Any]:
    """The layout of a figure with one row per cell. The rows are from top to bottom in the order of the summary table."""
    y_axis = make_axis("", type="category", categoryorder="array", categoryarray=list(reversed(group.labels)), showgrid=False)
    y_axis |= {"tickfont": {"size": 13, "color": INK}, "range": [-0.6, len(group.marks) - 0.4]}
    return make_layout(make_axis(x_title, rangemode="tozero", nticks=5, tickangle=0), y_axis)


def sum_rows_px(group: WorkloadGroup) -> int:
    """The height in pixels of a figure with one row per cell."""
    return MARGIN_PX + (ROW_PX if len(group.marks) <= MAX_TALL_ROWS else DENSE_ROW_PX) * len(group.marks)
