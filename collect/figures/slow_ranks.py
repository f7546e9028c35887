"""Draws how much of the communication time is waiting for slow ranks, and how much of the waiting makes the step longer."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import CellMark, Figure, Group
from collect.findings.trace_answers import profiled_runs
from collect.traces.run_answers import RunAnswers

NAME = "slow_ranks"
PARTS = {
    "transfer": "var(--series-1)",
    "waiting, hidden behind compute": "var(--series-3)",
    "waiting, lost": "var(--series-2)",
}


def draw(group: Group) -> Figure | None:
    """Draw one bar for each cell in whose traces the calls of a collective on different ranks were matched with each other."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(matched_runs(mark)))
    if not drawn_group.marks:
        return None
    parts_by_cell = [communication_parts(mark) for mark in drawn_group.marks]
    bars = [BarPart(name, colour, [cell_parts[name] for cell_parts in parts_by_cell]) for name, colour in PARTS.items()]
    caption = (
        "Collectives that wait for all ranks, in a profiled step; mean over profiled ranks and repeats. A rank waits until the "
        "last rank has started the collective. At the end of each bar: the share of the step that is lost to waiting while "
        f"nothing computes, and the rank that the others wait for the longest.{left_out_note}"
    )
    end_texts = [_end_text(mark) for mark in drawn_group.marks]
    return draw_bars(NAME, "Waiting for slow ranks", caption, drawn_group, [BarPanel("ms per step", "ms", bars, end_texts)])


def matched_runs(mark: CellMark) -> list[RunAnswers]:
    """The runs of a cell in whose traces the calls of a collective on different ranks were matched with each other."""
    return [run for run in profiled_runs(mark.cell) if run.waits.ranks]


def communication_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a step by part (PARTS). The parts add up to the durations of all matched calls of collectives."""
    runs = matched_runs(mark)
    steps = sum(rank.steps for run in runs for rank in run.ranks) * 1e6
    total_ns = sum(run.ranks[rank_index].calls[call].duration_ns for run in runs for rank_index, call in run.waits.waited)
    waited_ns = sum(rank.waited_ns for run in runs for rank in run.waits.ranks)
    lost_ns = sum(rank.lost_ns for run in runs for rank in run.waits.ranks)
    values = ((total_ns - waited_ns) / steps, (waited_ns - lost_ns) / steps, lost_ns / steps)
    return dict(zip(PARTS, values, strict=True))


def _end_text(mark: CellMark) -> str:
    runs = matched_runs(mark)
    lost_ns = sum(rank.lost_ns for run in runs for rank in run.waits.ranks)
    span_ns = sum(rank.span_ns for run in runs for rank in run.waits.ranks)
    ranks = {run.waits.straggler.rank for run in runs if run.waits.straggler}
    slowest = f", rank {ranks.pop()}" if len(ranks) == 1 else ""  # none if repeats have different slowest ranks
    return f"{notation.format_number(100 * lost_ns / span_ns, 2)} % lost{slowest}" if span_ns else ""
