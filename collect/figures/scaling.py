"""Speed-up over the number of ranks, where a strategy ran on more than one number of them."""

from __future__ import annotations

from typing import Any

from collect.figure import MUTED, Figure, Group, Mark, axis, layout

NAME = "speed_up"


def draw(group: Group) -> Figure | None:
    """One line for the cells that differ in their ranks only; no figure where every line would be a point."""
    lines: dict[str, list[Mark]] = {}
    for mark in group.marks:
        if NAME in mark.row.metrics:
            lines.setdefault(mark.label.replace(f" ×{mark.cell.cell.gpus}", "", 1), []).append(mark)
    if all(len({mark.cell.cell.gpus for mark in marks}) < 2 for marks in lines.values()):
        return None
    data: list[dict[str, Any]] = []
    for name, marks in lines.items():
        marks.sort(key=lambda mark: mark.cell.cell.gpus)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [mark.cell.cell.gpus for mark in marks],
                "y": [mark.row.metrics[NAME].value for mark in marks],
                "line": {"color": marks[0].look.colour, "dash": marks[0].look.dash, "width": 2},
                "marker": {"size": 8, "symbol": marks[0].look.symbol},
                "hovertemplate": "%{y:.3~g}x on %{x} ranks",
            }
        )
    ranks = sorted({mark.cell.cell.gpus for marks in lines.values() for mark in marks})
    data.append(_ideal(group, ranks))
    y = axis(f"speed-up against {group.baseline} (x)", rangemode="tozero")
    shape = layout(axis("ranks", tickvals=ranks, showgrid=False), y, showlegend=True)
    return Figure(
        NAME, "Scaling", "Ratio of mean throughputs. Dotted: as many times faster as there are more ranks.", 380, data, shape
    )


def _ideal(group: Group, ranks: list[int]) -> dict[str, Any]:
    """The line through the ranks of the baselines, which have a speed-up of 1."""
    baselines = {mark.row.baseline for mark in group.marks}
    first = min(mark.cell.cell.gpus for mark in group.marks if mark.row.id in baselines)
    ends = [ranks[0], ranks[-1]]
    line = {"color": MUTED, "width": 1.5, "dash": "dot"}
    y = [end / first for end in ends]
    return {"type": "scatter", "mode": "lines", "name": "ideal", "x": ends, "y": y, "line": line, "hoverinfo": "skip"}
