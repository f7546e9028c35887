"""Draws accuracy, staleness, training time and sent bytes over the interval at which workers pull parameters (section 5.3 of
study 3: more frequent communication)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect import notation
from collect.drawing.series import group_alike, line_labels
from collect.figure import MOST_SHOWN, CellMark, Figure, Group, axis, layout
from collect.strategy_style import Look, variant_looks

KEY = "options.pull_interval"
PANELS = {  # metric -> the title of its panel without the unit, from top to bottom
    "final_accuracy_pct": "accuracy",
    "staleness_mean": "staleness",
    "train_time_s": "training time",
    "sent_counted_bytes": "sent per step",
}
PANEL_PX, MARGIN_PX, GAP = 130, 90, 0.16  # GAP: share of the height of a panel between it and the next


def draw(group: Group) -> Figure | None:
    """Draw one line for each set of cells that differ only in the interval. None if no set has two intervals that ran."""
    lines = [
        sorted(marks, key=_pull_interval)
        for marks in group_alike([mark for mark in group.marks if KEY in mark.row.flat], (KEY,))
        if len({_pull_interval(mark) for mark in marks if mark.row.n}) > 1
    ]
    line_marks = [mark for marks in lines for mark in marks]
    drawn = [metric for metric in PANELS if any(metric in mark.row.metrics for mark in line_marks)]
    if not lines or not drawn:
        return None
    looks = variant_looks([marks[0].strategy for marks in lines])
    panel_height = 1 / len(drawn)
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    for panel_index, metric in enumerate(drawn):
        unit, size = _panel_unit(metric, line_marks)
        number = str(panel_index + 1) if panel_index else ""
        top = 1 - panel_index * panel_height
        axes[f"yaxis{number}"] = axis(
            f"{PANELS[metric]}, {unit}", rangemode="tozero", nticks=4, domain=[top - (1 - GAP) * panel_height, top]
        )
        for index, (name, marks) in enumerate(zip(_line_names(lines), lines, strict=True)):
            line = _metric_line(marks, looks[index], metric, size, unit)
            shared = {"name": name, "legendgroup": name, "visible": True if index < MOST_SHOWN else "legendonly"}
            data.append(shared | line | {"yaxis": f"y{number}", "showlegend": panel_index == 0})
    intervals = sorted({_pull_interval(mark) for mark in line_marks})
    x = axis("pushes between two pulls, log scale", type="log", tickvals=intervals, ticktext=list(map(str, intervals)))
    x |= {"anchor": f"y{len(drawn)}" if len(drawn) > 1 else "y", "showgrid": False}
    frame = layout(x, axes.pop("yaxis"), **axes, showlegend=True)
    caption = (
        "A worker pulls parameters once in this many pushes, so the left end is the most frequent communication. Means over "
        "repeats. The cells of a line differ only in the interval. Accuracy: of the parameters that servers have at the end."
    )
    return Figure("pull_interval", "How often workers pull parameters", caption, MARGIN_PX + PANEL_PX * len(drawn), data, frame)


def _pull_interval(mark: CellMark) -> int:
    interval: int = mark.row.flat[KEY]
    return interval


def _line_names(lines: Sequence[Sequence[CellMark]]) -> list[str]:
    return line_labels([(marks[0], {}) for marks in lines], (KEY,))


def _panel_unit(metric: str, marks: Sequence[CellMark]) -> tuple[str, float]:
    """(the unit of a panel, how many units of the metric make one unit of the panel)."""
    known_estimates = [estimate for mark in marks if (estimate := mark.row.metrics.get(metric))]
    if known_estimates[0].unit == "bytes":
        return notation.bytes_unit([estimate.value for estimate in known_estimates])
    return known_estimates[0].unit, 1.0


def _metric_line(marks: Sequence[CellMark], look: Look, metric: str, size: float, unit: str) -> dict[str, Any]:
    known_estimates = [(_pull_interval(mark), estimate) for mark in marks if (estimate := mark.row.metrics.get(metric))]
    above = [None if estimate.high is None else (estimate.high - estimate.value) / size for _, estimate in known_estimates]
    below = [None if estimate.low is None else (estimate.value - estimate.low) / size for _, estimate in known_estimates]
    error_bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.5, "width": 4}
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [interval for interval, _ in known_estimates],
        "y": [estimate.value / size for _, estimate in known_estimates],
        "error_y": error_bars | {"color": look.colour},
        "line": look.line,
        "marker": look.marks(8),
        "hovertemplate": f"%{{y:,.4~g}} {unit}, a pull in %{{x}} pushes",
    }
