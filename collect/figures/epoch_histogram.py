"""How the times of a cell's epochs are spread: two equal means may hide two kinds of epoch."""

from __future__ import annotations

from typing import Any

from collect.figure import MOST_SHOWN, Figure, Group, axis, layout

FEWEST = 5  # epochs; of fewer a histogram shows only where they are


def draw(group: Group) -> Figure | None:
    """One histogram a cell over all its completed repeats, in bins that all cells share."""
    data: list[dict[str, Any]] = []
    for mark in group.marks:
        times = [time for run in mark.cell.completed if run.result for time in run.result.epoch_time_s or ()]
        if len(times) >= FEWEST:
            data.append(
                {
                    "type": "histogram",
                    "name": mark.label,
                    "x": times,
                    "bingroup": "epochs",
                    "nbinsx": 40,
                    "marker": {"color": mark.look.colour},
                    "opacity": 0.7,
                    "visible": True if len(data) < MOST_SHOWN else "legendonly",
                    "hovertemplate": "%{y} epochs of %{x} s",
                }
            )
    caption = "Epochs of all completed repeats by the time that they took; the bins are those of all cells together."
    shape = layout(axis("seconds", showgrid=False), axis("epochs"), showlegend=True, barmode="overlay")
    return Figure("epoch_histogram", "Times of epochs", caption, 380, data, shape) if data else None
