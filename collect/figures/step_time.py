"""Draws the distribution of the step times of each cell."""

from __future__ import annotations

from typing import Any

import polars as pl

from collect.drawing.panel_rows import rows
from collect.figure import Figure, Group, rows_height_px, rows_layout, state_trace
from collect.sources.steps import select_undisturbed

SHARES = {"lowerfence": 0.05, "q1": 0.25, "median": 0.5, "q3": 0.75, "upperfence": 0.95}


def draw(group: Group) -> Figure | None:
    """Draw one box per cell for its timed steps in all completed repeats. The whiskers are the 5th and 95th percentile."""
    data: list[dict[str, Any]] = []
    for mark in group.marks:
        if mark.cell.completed:
            times = pl.concat(select_undisturbed(run.timed, run.world) for run in mark.cell.completed)["step_ms"]
            data.append(
                {
                    "type": "box",
                    "orientation": "h",
                    "y": [mark.label],
                    "line": {"color": mark.look.colour, "width": 1.5},
                    "fillcolor": "rgba(0,0,0,0)",
                    "width": 0.45,
                    "hoverinfo": "x",
                    "name": mark.label,
                    "meta": mark.row.id,
                }
                | {part: [times.quantile(share, "linear")] for part, share in SHARES.items()}
            )
    if not data:
        return None
    data.append(state_trace(group, [bool(mark.cell.completed) for mark in group.marks]))
    caption = "The slowest rank in each timed step, all repeats. Box: quartiles and median; whiskers: 5th to 95th percentile."
    return rows(Figure("step_time", "Step time", caption, rows_height_px(group), data, rows_layout(group, "ms")), group.marks)
