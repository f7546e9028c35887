"""Draws the peak memory of a step by category for each cell, compared with the estimate of memory that papers use."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import CellMark, Figure, Group
from collect.figures.memory_timeline import CATEGORIES, category_label

NAME = "memory_categories"


def draw(group: Group) -> Figure | None:
    """Draw one bar for each cell whose memory was observed by category, with a vertical mark at the estimate for the cell."""
    drawn, left_out_note = select_cells(group, lambda mark: bool(peak_bytes(mark)))
    if not drawn.marks:
        return None
    peaks = [peak_bytes(mark) for mark in drawn.marks]
    unit, size = notation.bytes_unit([sum(peak.values()) for peak in peaks])
    bars = [
        BarPart(category_label(name), colour, [peak[name] / size if name in peak else None for peak in peaks])
        for name, colour in CATEGORIES.items()
        if any(peak.get(name) for peak in peaks)
    ]
    end_texts = [notation.format_number(sum(peak.values()) / size, 3) for peak in peaks]
    caption = (
        "Memory at the peak of the observed step, on the rank with the highest peak; mean over repeats. "
        f"Vertical mark: estimate of parameters, gradients and optimizer state, without activations.{left_out_note}"
    )
    estimates = [mark.row.metrics.get("estimated_memory_bytes") for mark in drawn.marks]
    strokes = [estimate.value / size if estimate else None for estimate in estimates]
    return draw_bars(NAME, "Memory by category at the peak", caption, drawn, [BarPanel(unit, unit, bars, end_texts, strokes)])


def peak_bytes(mark: CellMark) -> dict[str, float]:
    """Bytes by category at the memory peak of a cell: the mean over completed repeats whose memory was observed by category."""
    run_peaks = [run.result.instruments.get("memory", {}).get("peak_bytes") for run in mark.cell.completed if run.result]
    known_peaks = [peak for peak in run_peaks if peak]
    names = {name for peak in known_peaks for name in peak}
    return {name: sum(peak.get(name, 0) for peak in known_peaks) / len(known_peaks) for name in names}
