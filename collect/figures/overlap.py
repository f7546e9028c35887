"""Draws how much of the communication is hidden behind compute. Only exposed communication, which is not hidden, costs time."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
from collect.figure import Figure, Group

NAME = "overlap"


def draw(group: Group) -> Figure | None:
    """Draw one bar for each profiled cell with communication. The overlap in percent is written at the end of the bar."""
    shown, left_out = some(group, lambda mark: {"overlap_pct", "communication_ms"} <= mark.row.metrics.keys())
    if not shown.marks:
        return None
    metrics = [mark.row.metrics for mark in shown.marks]
    exposed = [found["exposed_communication_ms"].value for found in metrics]
    hidden = [found["communication_ms"].value - apart for found, apart in zip(metrics, exposed, strict=True)]
    bars = [BarPart("hidden behind compute", "var(--series-1)", hidden), BarPart("exposed", "var(--series-2)", exposed)]
    ends = [f"{notation.number(found['overlap_pct'].value, 3)} % hidden" for found in metrics]
    caption = (
        "Communication of a profiled step, including the wait for other ranks; mean over profiled ranks and repeats. At the "
        f"end of each bar: the overlap, which is the mean over ranks of the hidden share of their communication.{left_out}"
    )
    return stacked(NAME, "Overlap", caption, shown, [BarPanel("ms of communication per step", "ms", bars, ends)])
