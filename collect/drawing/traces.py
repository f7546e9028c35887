"""Makes plotly's traces: points, bars, the intervals of means, and the states of cells without a value.

The number of points is limited, which keeps the page small, so that it opens fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collect.figure import MOST_SHOWN, MUTED, CellMark, WorkloadGroup
from collect.findings.statistics import Estimate

MOST_POINTS = 600  # the most points of one line in a figure: about as many as a screen can show


def make_points(mode: str, x_values: Sequence[Any], y_values: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """A trace of points. mode: `lines`, `markers`, `lines+markers` or `text`. settings: other settings of plotly."""
    return {"type": "scatter", "mode": mode, "x": x_values, "y": y_values} | settings


def make_horizontal_bars(x_values: Sequence[Any], y_values: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """A trace of bars from left to right. x_values: the lengths of the bars. y_values: their rows. settings: other settings of
    plotly."""
    return {"type": "bar", "orientation": "h", "x": x_values, "y": y_values} | settings


def make_span_bars(
    spans: Sequence[tuple[Any, float, float]], name: str, colour: str, hover_template: str, **settings: Any
) -> dict[str, Any]:
    """A trace of bars that begin anywhere. spans: (row, start, length) of each bar. hover_template: plotly's
    `hovertemplate`."""
    lengths, rows, starts = ([span[field_index] for span in spans] for field_index in (2, 0, 1))
    marker = {"color": colour, "line": {"width": 0}}
    return make_horizontal_bars(lengths, rows, base=starts, name=name, marker=marker, hovertemplate=hover_template, **settings)


def make_error_bars(estimates: Sequence[Estimate], colour: str, unit_size: float = 1.0) -> dict[str, Any]:
    """Error bars of plotly that show the 95 % intervals of means. A mean whose interval is not known has no bar.

    unit_size: how many units of the estimates make one unit of the axis, such as 2^30 for bytes that are drawn in GiB.
    """
    lengths_above = [None if estimate.high is None else (estimate.high - estimate.value) / unit_size for estimate in estimates]
    lengths_below = [None if estimate.low is None else (estimate.value - estimate.low) / unit_size for estimate in estimates]
    if not any(length is not None for length in (*lengths_above, *lengths_below)):
        return {"visible": False}
    bar_settings = {"type": "data", "symmetric": False, "array": lengths_above, "arrayminus": lengths_below}
    return bar_settings | {"color": colour, "thickness": 1.5, "width": 4}


def make_states(group: WorkloadGroup, is_drawn: Callable[[CellMark], bool]) -> dict[str, Any]:
    """A plotly trace for the cells without a value: it writes the state of each such cell, such as `oom`, into its row.

    is_drawn: whether the figure draws a value for a cell.
    """
    missing_marks = [mark for mark in group.marks if not is_drawn(mark)]
    text_settings: dict[str, Any] = {"text": [f"  {mark.row.state}" for mark in missing_marks], "textposition": "middle right"}
    text_settings |= {"textfont": {"color": MUTED, "size": 12}, "hoverinfo": "skip", "cliponaxis": False}
    labels = [mark.label for mark in missing_marks]
    return make_points("text", [0] * len(missing_marks), labels, meta=[mark.row.id for mark in missing_marks], **text_settings)


def compute_max_points(line_count: int) -> int:
    """The largest number of points that each line may have in a figure with `line_count` lines.

    The number is chosen so that the whole figure has at most MOST_SHOWN * MOST_POINTS points. But a line may always have 100
    points.
    """
    return max(MOST_POINTS * MOST_SHOWN // max(line_count, MOST_SHOWN), 100)


def thin_points(
    x_values: Sequence[float], y_values: Sequence[float | None], max_points: int = MOST_POINTS
) -> tuple[list[float], list[float | None]]:
    """Reduce the points of a line to those of `pick_points`. Returns the x values and the y values that are kept."""
    kept_indexes = pick_points(y_values, max_points)
    return [x_values[index] for index in kept_indexes], [y_values[index] for index in kept_indexes]


def pick_points(y_values: Sequence[float | None], max_points: int) -> list[int]:
    """The indexes of at most about `max_points` points of a line.

    The points are divided into sections of equal size. Of each section, the points with the smallest and the largest y are
    kept, so that no peak is lost. If y is unknown (None) somewhere in the section, the first such point is kept too, so
    that no line is drawn across a gap."""
    if len(y_values) <= max_points:
        return list(range(len(y_values)))
    section_size = -(-(2 if None not in y_values else 3) * len(y_values) // max_points)
    picked_indexes: list[int] = []
    for start in range(0, len(y_values), section_size):
        section = y_values[start : start + section_size]
        indexed_values = [(value, index) for index, value in enumerate(section, start) if value is not None]
        extreme_indexes = {min(indexed_values)[1], max(indexed_values)[1]} if indexed_values else set()
        picked_indexes += sorted(extreme_indexes | {start + section.index(None)} if None in section else extreme_indexes)
    return picked_indexes
