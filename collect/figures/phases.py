"""Draws the time of the phases of a profiled step: data, forward, backward, optimizer."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import CellMark, Figure, Group
from collect.metrics.trace_phases import phase_time

NAME = "phases"
PHASES = {
    "data": "var(--series-4)",
    "forward": "var(--series-1)",
    "backward": "var(--series-2)",
    "optimizer": "var(--series-3)",
    "other": "var(--line)",
}


def draw(group: Group) -> Figure | None:
    """Draw one bar for each cell that was profiled by steps and whose traces show more than one phase."""
    drawn_group, left_out_note = select_cells(group, lambda mark: len(phase_ms(mark)) > 1)
    if not drawn_group.marks:
        return None
    ms_by_cell = [phase_ms(mark) for mark in drawn_group.marks]
    bars = [BarPart(name, colour, [cell_ms.get(name) for cell_ms in ms_by_cell]) for name, colour in PHASES.items()]
    bars = [bar for bar in bars if any(bar.values)]
    caption = (
        "One profiled step; mean over profiled ranks and repeats. On a GPU: the union of all kernels and memory operations "
        "that a phase launched; work of two phases may run at the same time, and each counts it. On a CPU: the time of the "
        f"main thread. Optimizer and data loader are known by torch's own annotations, backward by autograd.{left_out_note}"
    )
    end_texts = [notation.format_number(sum(cell_ms.values()), 3) for cell_ms in ms_by_cell]
    return draw_bars(NAME, "Phases of a step", caption, drawn_group, [BarPanel("ms per step", "ms", bars, end_texts)])


def phase_ms(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a step of a cell by phase, as the mean over the completed runs that were profiled by steps."""
    ms_by_phase = {}
    for phase in PHASES:
        run_ms = [time.value for run in mark.cell.completed if (time := phase_time(run, phase)) is not None]
        if run_ms:
            ms_by_phase[phase] = sum(run_ms) / len(run_ms)
    return ms_by_phase
