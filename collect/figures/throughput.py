"""Throughput of every cell, beside what ideal scaling of its baseline would give."""

from __future__ import annotations

from typing import Any

from collect.figure import INK, MUTED, Figure, Group, by_cell, by_cell_height, interval, states

NAME = "throughput_per_s"


def draw(group: Group) -> Figure | None:
    """A mark with its interval per cell."""
    found = [mark.row.metrics.get(NAME) for mark in group.marks]
    unit = next((estimate.unit for estimate in found if estimate), None)
    if unit is None:
        return None
    data = [states(group, [estimate is not None for estimate in found]), _ideal(group, unit)]
    for mark, estimate in zip(group.marks, found, strict=True):
        if estimate:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [estimate.value],
                    "y": [mark.label],
                    "error_x": interval(estimate, mark.look.colour),
                    "marker": mark.look.marks(10),
                    "hovertemplate": f"%{{x:,.4~g}} {unit}, n = {estimate.n}<extra>%{{y}}</extra>",
                }
            )
    caption = f"Mean over repeats with its 95 % interval. Upright line: ideal scaling of {group.baseline} to as many ranks."
    return Figure(NAME, "Throughput", caption, by_cell_height(group), data, by_cell(group, unit))


def _ideal(group: Group, unit: str) -> dict[str, Any]:
    """The throughput of each cell's baseline, times the ratio of ranks."""
    by_id = {mark.row.id: mark.row for mark in group.marks}
    x, y = [], []
    for mark in group.marks:
        against = by_id.get(mark.row.baseline or "")
        if against is not None and against is not mark.row and NAME in against.metrics:
            x.append(against.metrics[NAME].value * mark.row.cell["gpus"] / against.cell["gpus"])
            y.append(mark.label)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "marker": {"symbol": "line-ns", "size": 20, "line": {"color": MUTED, "width": 2}, "color": INK},
        "hovertemplate": f"ideal: %{{x:,.4~g}} {unit}<extra>%{{y}}</extra>",
    }
