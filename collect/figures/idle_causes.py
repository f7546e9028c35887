"""Draws the idle time of a profiled step by cause: the host launched nothing, the GPU waits for communication, or another
cause."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import Figure, Group

NAME = "idle_causes"
PARTS = {
    "idle_host_ms": ("the host launched nothing", "var(--series-1)"),
    "idle_communication_ms": ("waiting for communication", "var(--series-2)"),
    "idle_other_ms": ("other", "var(--series-5)"),
}


def draw(group: Group) -> Figure | None:
    """Draw one bar for each profiled cell whose idle time has known causes. The length of a bar is the idle time of a step."""
    drawn, note = select_cells(group, lambda mark: PARTS.keys() <= mark.row.metrics.keys())
    if not any(mark.row.metrics[name].value for mark in drawn.marks for name in PARTS):
        return None
    values_by_cell = [[mark.row.metrics[name].value for name in PARTS] for mark in drawn.marks]
    bars = [
        BarPart(name, colour, values)
        for (name, colour), values in zip(PARTS.values(), zip(*values_by_cell, strict=True), strict=True)
        if any(values)
    ]
    caption = (
        "Time of a profiled step in which nothing runs; mean over profiled ranks and repeats. The host launched nothing: no "
        f"launched work waits to run. Other: launched work does not start yet, such as while a launch takes effect.{note}"
    )
    end_texts = [notation.format_number(sum(values), 3) for values in values_by_cell]
    return draw_bars(NAME, "Idle time by cause", caption, drawn, [BarPanel("ms of idle time per step", "ms", bars, end_texts)])
