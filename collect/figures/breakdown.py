"""Draws the parts of the time of a profiled step: compute, exposed communication, exposed memory operations, and idle time."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import CellMark, Figure, Group

NAME = "breakdown"
PARTS = {
    "compute": "var(--series-1)",
    "exposed communication": "var(--series-2)",
    "exposed memory operations": "var(--series-5)",
    "idle": "var(--line)",
}


def draw(group: Group) -> Figure | None:
    """Draw one bar for each cell that has traces. A bar is as long as a step, from the first kernel to the last."""
    drawn_group, left_out_note = select_cells(group, lambda mark: "idle_ms" in mark.row.metrics)
    if not drawn_group.marks:
        return None
    parts_by_cell = [step_parts(mark) for mark in drawn_group.marks]
    bars = [BarPart(name, colour, [cell_parts.get(name) for cell_parts in parts_by_cell]) for name, colour in PARTS.items()]
    bars = [bar for bar in bars if any(bar.values)]
    end_texts = [notation.format_number(sum(cell_parts.values()), 3) for cell_parts in parts_by_cell]
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Exposed: while nothing computes. Communication that is "
        f"hidden behind compute counts as compute. Profiling itself makes steps longer.{left_out_note}"
    )
    return draw_bars(NAME, "Where a step's time went", caption, drawn_group, [BarPanel("ms per step", "ms", bars, end_texts)])


def step_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a profiled step of a cell by part. The parts add up to the time from the first kernel to the last."""
    times = {name: mark.row.metrics[f"{name}_ms"].value for name in ("compute", "non_compute", "exposed_communication", "idle")}
    return {
        "compute": times["compute"],
        "exposed communication": times["exposed_communication"],
        "exposed memory operations": times["non_compute"] - times["exposed_communication"],
        "idle": times["idle"],
    }
