"""Draws the peak memory of a step by category for each cell, compared with the estimate of memory that papers use."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
from collect.figure import CellMark, Figure, Group
from collect.figures.memory_timeline import CATEGORIES, written

NAME = "memory_categories"


def draw(group: Group) -> Figure | None:
    """Draw one bar for each cell whose memory was observed by category, with a vertical mark at the estimate for the cell."""
    shown, left_out = some(group, lambda mark: bool(peak_bytes(mark)))
    if not shown.marks:
        return None
    found = [peak_bytes(mark) for mark in shown.marks]
    unit, size = notation.bytes_unit([sum(peak.values()) for peak in found])
    bars = [
        BarPart(written(name), colour, [peak[name] / size if name in peak else None for peak in found])
        for name, colour in CATEGORIES.items()
        if any(peak.get(name) for peak in found)
    ]
    ends = [notation.number(sum(peak.values()) / size, 3) for peak in found]
    caption = (
        "Memory at the peak of the observed step, on the rank with the highest peak; mean over repeats. "
        f"Vertical mark: estimate of parameters, gradients and optimizer state, without activations.{left_out}"
    )
    estimates = [mark.row.metrics.get("estimated_memory_bytes") for mark in shown.marks]
    strokes = [estimate.value / size if estimate else None for estimate in estimates]
    return stacked(NAME, "Memory by category at the peak", caption, shown, [BarPanel(unit, unit, bars, ends, strokes)])


def peak_bytes(mark: CellMark) -> dict[str, float]:
    """Bytes by category at the memory peak of a cell: the mean over completed repeats whose memory was observed by category."""
    found = [run.result.instruments.get("memory", {}).get("peak_bytes") for run in mark.cell.completed if run.result]
    known = [peak for peak in found if peak]
    names = {name for peak in known for name in peak}
    return {name: sum(peak.get(name, 0) for peak in known) / len(known) for name in names}
