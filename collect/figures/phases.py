"""Draws the time of the phases of a profiled step: data, forward, backward, optimizer."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
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
    shown, left_out = some(group, lambda mark: len(times(mark)) > 1)
    if not shown.marks:
        return None
    found = [times(mark) for mark in shown.marks]
    bars = [BarPart(name, colour, [time.get(name) for time in found]) for name, colour in PHASES.items()]
    bars = [bar for bar in bars if any(bar.values)]
    caption = (
        "One profiled step; mean over profiled ranks and repeats. On a GPU: the union of all kernels and memory operations "
        "that a phase launched; work of two phases may run at the same time, and each counts it. On a CPU: the time of the "
        f"main thread. Optimizer and data loader are known by torch's own annotations, backward by autograd.{left_out}"
    )
    ends = [notation.number(sum(time.values()), 3) for time in found]
    return stacked(NAME, "Phases of a step", caption, shown, [BarPanel("ms per step", "ms", bars, ends)])


def times(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a step of a cell by phase, as the mean over the completed runs that were profiled by steps."""
    found = {}
    for phase in PHASES:
        known = [time.value for run in mark.cell.completed if (time := phase_time(run, phase)) is not None]
        if known:
            found[phase] = sum(known) / len(known)
    return found
