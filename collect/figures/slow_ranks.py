"""Draws how much of the communication time is waiting for slow ranks, and how much of the waiting makes the step longer."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
from collect.figure import CellMark, Figure, Group
from collect.findings.trace_answers import profiled
from collect.traces.run_answers import RunAnswers

NAME = "slow_ranks"
PARTS = {
    "transfer": "var(--series-1)",
    "waiting, hidden behind compute": "var(--series-3)",
    "waiting, lost": "var(--series-2)",
}


def draw(group: Group) -> Figure | None:
    """Draw one bar for each cell in whose traces the calls of a collective on different ranks were matched with each other."""
    shown, left_out = some(group, lambda mark: bool(matched(mark)))
    if not shown.marks:
        return None
    found = [parts(mark) for mark in shown.marks]
    bars = [BarPart(name, colour, [part[name] for part in found]) for name, colour in PARTS.items()]
    caption = (
        "Collectives that wait for all ranks, in a profiled step; mean over profiled ranks and repeats. A rank waits until the "
        "last rank has started the collective. At the end of each bar: the share of the step that is lost to waiting while "
        f"nothing computes, and the rank that the others wait for the longest.{left_out}"
    )
    ends = [_end(mark) for mark in shown.marks]
    return stacked(NAME, "Waiting for slow ranks", caption, shown, [BarPanel("ms per step", "ms", bars, ends)])


def matched(mark: CellMark) -> list[RunAnswers]:
    """The runs of a cell in whose traces the calls of a collective on different ranks were matched with each other."""
    return [run for run in profiled(mark.cell) if run.waits.ranks]


def parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a step by part (PARTS). The parts add up to the durations of all matched calls of collectives."""
    runs = matched(mark)
    steps = sum(one.steps for run in runs for one in run.ranks) * 1e6
    total = sum(run.ranks[place].calls[call].duration_ns for run in runs for place, call in run.waits.waited)
    waited = sum(one.waited_ns for run in runs for one in run.waits.ranks)
    lost = sum(one.lost_ns for run in runs for one in run.waits.ranks)
    values = ((total - waited) / steps, (waited - lost) / steps, lost / steps)
    return dict(zip(PARTS, values, strict=True))


def _end(mark: CellMark) -> str:
    runs = matched(mark)
    lost = sum(one.lost_ns for run in runs for one in run.waits.ranks)
    span = sum(one.span_ns for run in runs for one in run.waits.ranks)
    ranks = {run.waits.straggler.rank for run in runs if run.waits.straggler}
    slowest = f", rank {ranks.pop()}" if len(ranks) == 1 else ""  # none if repeats have different slowest ranks
    return f"{notation.number(100 * lost / span, 2)} % lost{slowest}" if span else ""
