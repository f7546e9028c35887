"""Draws the parts of the time of a profiled step: compute, exposed communication, exposed memory operations, and idle time."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
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
    shown, left_out = some(group, lambda mark: "idle_ms" in mark.row.metrics)
    if not shown.marks:
        return None
    found = [parts(mark) for mark in shown.marks]
    bars = [BarPart(name, colour, [part.get(name) for part in found]) for name, colour in PARTS.items()]
    bars = [bar for bar in bars if any(bar.values)]
    ends = [notation.number(sum(part.values()), 3) for part in found]
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Exposed: while nothing computes. Communication that is "
        f"hidden behind compute counts as compute. Profiling itself makes steps longer.{left_out}"
    )
    return stacked(NAME, "Where a step's time went", caption, shown, [BarPanel("ms per step", "ms", bars, ends)])


def parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a profiled step of a cell by part. The parts add up to the time from the first kernel to the last."""
    found = {name: mark.row.metrics[f"{name}_ms"].value for name in ("compute", "non_compute", "exposed_communication", "idle")}
    return {
        "compute": found["compute"],
        "exposed communication": found["exposed_communication"],
        "exposed memory operations": found["non_compute"] - found["exposed_communication"],
        "idle": found["idle"],
    }
