"""Draws the throughput of each cell, compared with the throughput that ideal scaling of its baseline would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect.drawing.panel_rows import rows
from collect.figure import INK, MUTED, Figure, Group, axis, by_cell, by_cell_height, interval, states
from collect.findings.statistics import Estimate

NAME = "throughput_per_s"
PADDING = 0.03  # share of the x axis that is added at both ends, so that no mark is cut
CUT = "Wider intervals are cut at the edge."
MOST_INTERVAL = 1.5  # an interval that exceeds this multiple of the largest mean of all cells is cut at this multiple


def draw(group: Group) -> Figure | None:
    """Draw one mark per cell at its mean throughput, with the interval of the mean."""
    found = [mark.row.metrics.get(NAME) for mark in group.marks]
    unit = next((estimate.unit for estimate in found if estimate), None)
    if unit is None:
        return None
    end = _end([estimate for estimate in found if estimate])
    data = [states(group, [estimate is not None for estimate in found]), *_ideal(group, unit, end)]
    for mark, estimate in zip(group.marks, found, strict=True):
        if estimate:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [estimate.value],
                    "y": [mark.label],
                    "meta": mark.row.id,
                    "error_x": interval(estimate, mark.look.colour),
                    "marker": mark.look.marks(10),
                    "hovertemplate": f"%{{x:,.4~g}} {unit}, n = {estimate.n}<extra>%{{y}}</extra>",
                }
            )
    caption = f"Mean over repeats with its 95 % interval. Vertical mark: ideal scaling of {group.baseline} to these ranks."
    if data[2]["x"]:
        caption += " Arrow at the edge: ideal scaling lies beyond this axis."
    if any(estimate is not None and (estimate.high or 0) > end for estimate in found):
        caption += f" {CUT}"
    shape = by_cell(group, unit)
    shape["xaxis"] = axis(unit, range=[-PADDING * end, end], nticks=5, tickangle=0)
    return rows(Figure(NAME, "Throughput", caption, by_cell_height(group), data, shape), group.marks)


def _end(found: Sequence[Estimate]) -> float:
    """The end of the x axis: after the largest mean and its interval. A very wide interval is cut at MOST_INTERVAL."""
    largest = max(estimate.value for estimate in found)
    widest = max(estimate.high or estimate.value for estimate in found)
    return (1 + PADDING) * min(widest, MOST_INTERVAL * largest) or 1.0


def _ideal(group: Group, unit: str, end: float) -> list[dict[str, Any]]:
    """The marks for ideal scaling: for each cell, the throughput of its baseline times the ratio of their numbers of ranks.

    If the result lies within the x axis, the mark is a vertical stroke; if it lies beyond the axis, an arrow at the edge. end:
    the end of the x axis.
    """
    by_id = {mark.row.id: mark.row for mark in group.marks}
    found = []
    for mark in group.marks:
        against = by_id.get(mark.row.baseline or "")
        if against is not None and against is not mark.row and NAME in against.metrics:
            ideal = against.metrics[NAME].value * mark.row.cell["gpus"] / against.cell["gpus"]
            found.append((ideal, mark.label))
    stroke = {"symbol": "line-ns", "size": 20, "line": {"color": MUTED, "width": 2}, "color": INK}
    arrow = {"symbol": "triangle-right", "size": 9, "color": MUTED}
    shown = [entry for entry in found if entry[0] <= end]
    beyond = [entry for entry in found if entry[0] > end]
    return [
        _strokes("ideal", [ideal for ideal, _ in shown], shown, stroke, unit),
        _strokes("ideal, beyond the axis", [end] * len(beyond), beyond, arrow, unit) | {"cliponaxis": False},
    ]


def _strokes(
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
