"""Draws the throughput of each cell, compared with the throughput that ideal scaling of its baseline would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect.drawing.panel_rows import rows
from collect.figure import INK, MUTED, Figure, Group, axis, error_bar, rows_height_px, rows_layout, state_trace
from collect.findings.statistics import Estimate

NAME = "throughput_per_s"
PADDING = 0.03  # share of the x axis that is added at both ends, so that no mark is cut
CUT_NOTE = "Wider intervals are cut at the edge."
MOST_INTERVAL = 1.5  # an interval that exceeds this multiple of the largest mean of all cells is cut at this multiple


def draw(group: Group) -> Figure | None:
    """Draw one mark per cell at its mean throughput, with the interval of the mean."""
    estimates = [mark.row.metrics.get(NAME) for mark in group.marks]
    unit = next((estimate.unit for estimate in estimates if estimate), None)
    if unit is None:
        return None
    axis_end = _axis_end([estimate for estimate in estimates if estimate])
    data = [state_trace(group, [estimate is not None for estimate in estimates]), *_ideal_traces(group, unit, axis_end)]
    for mark, estimate in zip(group.marks, estimates, strict=True):
        if estimate:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [estimate.value],
                    "y": [mark.label],
                    "meta": mark.row.id,
                    "error_x": error_bar(estimate, mark.look.colour),
                    "marker": mark.look.marks(10),
                    "hovertemplate": f"%{{x:,.4~g}} {unit}, n = {estimate.n}<extra>%{{y}}</extra>",
                }
            )
    caption = f"Mean over repeats with its 95 % interval. Vertical mark: ideal scaling of {group.baseline} to these ranks."
    if data[2]["x"]:
        caption += " Arrow at the edge: ideal scaling lies beyond this axis."
    if any(estimate is not None and (estimate.high or 0) > axis_end for estimate in estimates):
        caption += f" {CUT_NOTE}"
    figure_layout = rows_layout(group, unit)
    figure_layout["xaxis"] = axis(unit, range=[-PADDING * axis_end, axis_end], nticks=5, tickangle=0)
    return rows(Figure(NAME, "Throughput", caption, rows_height_px(group), data, figure_layout), group.marks)


def _axis_end(estimates: Sequence[Estimate]) -> float:
    """The end of the x axis: after the largest mean and its interval. A very wide interval is cut at MOST_INTERVAL."""
    largest = max(estimate.value for estimate in estimates)
    widest = max(estimate.high or estimate.value for estimate in estimates)
    return (1 + PADDING) * min(widest, MOST_INTERVAL * largest) or 1.0


def _ideal_traces(group: Group, unit: str, axis_end: float) -> list[dict[str, Any]]:
    """The marks for ideal scaling: for each cell, the throughput of its baseline times the ratio of their numbers of ranks.

    If the result lies within the x axis, the mark is a vertical stroke; if it lies beyond the axis, an arrow at the edge.
    axis_end: the end of the x axis."""
    by_id = {mark.row.id: mark.row for mark in group.marks}
    ideal_points = []
    for mark in group.marks:
        baseline_row = by_id.get(mark.row.baseline or "")
        if baseline_row is not None and baseline_row is not mark.row and NAME in baseline_row.metrics:
            ideal = baseline_row.metrics[NAME].value * mark.row.cell["gpus"] / baseline_row.cell["gpus"]
            ideal_points.append((ideal, mark.label))
    stroke = {"symbol": "line-ns", "size": 20, "line": {"color": MUTED, "width": 2}, "color": INK}
    arrow = {"symbol": "triangle-right", "size": 9, "color": MUTED}
    inside = [entry for entry in ideal_points if entry[0] <= axis_end]
    beyond = [entry for entry in ideal_points if entry[0] > axis_end]
    return [
        _ideal_marks("ideal", [ideal for ideal, _ in inside], inside, stroke, unit),
        _ideal_marks("ideal, beyond the axis", [axis_end] * len(beyond), beyond, arrow, unit) | {"cliponaxis": False},
    ]


def _ideal_marks(
    name: str, x: Sequence[float], entries: Sequence[tuple[float, str]], marker: dict[str, Any], unit: str
) -> dict[str, Any]:
    """Marks for ideal scaling. x: the place of each mark. entries: (throughput by ideal scaling, label of the cell) for each
    mark."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(x),
        "y": [label for _, label in entries],
        "customdata": [ideal for ideal, _ in entries],
        "marker": marker,
        "hovertemplate": f"ideal: %{{customdata:,.4~g}} {unit}<extra>%{{y}}</extra>",
    }
