"""Draws the calls and the time of the collectives in a step, which shows whether there are many small or a few large calls."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
from collect.figure import CellMark, Figure, Group
from collect.traces import per_step
from collect.traces.breakdown import renamed
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
    shown, left_out = some(group, lambda mark: bool(tallies(mark)))
    if not shown.marks:
        return None
    found = [tallies(mark) for mark in shown.marks]
    kinds = [(kind, colour) for kind, colour in KINDS.items() if any(kind in tally for tally in found)]
    panels = []
    for place, (title, unit) in enumerate((("calls per step", "calls"), ("ms per step", "ms"))):
        values = {kind: [tally[kind][place] if kind in tally else None for tally in found] for kind, _ in kinds}
        ends = [_written(sum(one[place] for one in tally.values())) for tally in found]
        panels.append(BarPanel(title, unit, [BarPart(kind, colour, values[kind]) for kind, colour in kinds], ends))
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Times are sums of durations, including the wait for other "
        f"ranks; if collectives run at the same time, each counts fully.{left_out}"
    )
    return stacked(NAME, "Collectives", caption, shown, panels)


def tallies(mark: CellMark) -> dict[str, Use]:
    """The calls and the time of the collectives in a step of a cell, by kind of collective (KINDS)."""
    runs = (run.traces.exact for run in mark.cell.completed)
    return per_step.uses(runs, lambda one: renamed(one.collectives, lambda name: KIND_OF.get(name, OTHER)))


def _written(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else notation.number(value, 3)
