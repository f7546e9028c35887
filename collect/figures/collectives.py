"""Draws the calls and the time of the collectives in a step, which shows whether there are many small or a few large calls."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import CellMark, Figure, Group
from collect.traces import per_step
from collect.traces.breakdown import rename_tallies
from collect.traces.per_step import Use

NAME = "collectives"
OTHER = "other"
KINDS = {
    "all_reduce": "var(--series-1)",
    "all_gather": "var(--series-2)",
    "reduce_scatter": "var(--series-3)",
    "broadcast": "var(--series-4)",
    "all_to_all": "var(--series-5)",
    "point to point": "var(--series-6)",
    OTHER: "var(--series-7)",
}
KIND_OF = {kind: kind for kind in KINDS} | dict.fromkeys(("send", "recv", "send_recv"), "point to point")


def draw(group: Group) -> Figure | None:
    """Draw two panels side by side: the calls of collectives in a step, and their time.

    Each panel has one bar for each cell that was profiled by steps and has collectives.
    """
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(collective_tallies(mark)))
    if not drawn_group.marks:
        return None
    cell_tallies = [collective_tallies(mark) for mark in drawn_group.marks]
    kinds = [(kind, colour) for kind, colour in KINDS.items() if any(kind in tally for tally in cell_tallies)]
    panels = []
    for field_index, (title, unit) in enumerate((("calls per step", "calls"), ("ms per step", "ms"))):
        values = {kind: [tally[kind][field_index] if kind in tally else None for tally in cell_tallies] for kind, _ in kinds}
        end_texts = [_format_count(sum(use[field_index] for use in tally.values())) for tally in cell_tallies]
        panels.append(BarPanel(title, unit, [BarPart(kind, colour, values[kind]) for kind, colour in kinds], end_texts))
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Times are sums of durations, including the wait for other "
        f"ranks; if collectives run at the same time, each counts fully.{left_out_note}"
    )
    return draw_bars(NAME, "Collectives", caption, drawn_group, panels)


def collective_tallies(mark: CellMark) -> dict[str, Use]:
    """The calls and the time of the collectives in a step of a cell, by kind of collective (KINDS)."""
    runs = (run.traces.exact for run in mark.cell.completed)
    return per_step.compute_uses_per_step(
        runs, lambda breakdown: rename_tallies(breakdown.collectives, lambda name: KIND_OF.get(name, OTHER))
    )


def _format_count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else notation.format_number(value, 3)
