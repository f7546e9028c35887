"""Draws how much of the communication is hidden behind compute. Only exposed communication, which is not hidden, costs time."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import Figure, Group

NAME = "overlap"


def draw(group: Group) -> Figure | None:
    """Draw one bar for each profiled cell with communication. The overlap in percent is written at the end of the bar."""
    drawn, left_out_note = select_cells(group, lambda mark: {"overlap_pct", "communication_ms"} <= mark.row.metrics.keys())
    if not drawn.marks:
        return None
    metrics = [mark.row.metrics for mark in drawn.marks]
    exposed = [entry["exposed_communication_ms"].value for entry in metrics]
    hidden = [entry["communication_ms"].value - exposed_ms for entry, exposed_ms in zip(metrics, exposed, strict=True)]
    bars = [BarPart("hidden behind compute", "var(--series-1)", hidden), BarPart("exposed", "var(--series-2)", exposed)]
    end_texts = [f"{notation.format_number(entry['overlap_pct'].value, 3)} % hidden" for entry in metrics]
    caption = (
        "Communication of a profiled step, including the wait for other ranks; mean over profiled ranks and repeats. At the "
        f"end of each bar: the overlap, which is the mean over ranks of the hidden share of their communication.{left_out_note}"
    )
    return draw_bars(NAME, "Overlap", caption, drawn, [BarPanel("ms of communication per step", "ms", bars, end_texts)])
