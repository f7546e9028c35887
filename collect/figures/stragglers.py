"""Draws what a rank that is slowed on purpose costs: the waiting of the ranks, and the throughput, beside ordinary cells."""

from __future__ import annotations

import statistics

import polars as pl

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
from collect.figure import CellMark, Figure, Group
from collect.findings.comparability import without_faults
from collect.metrics.rank_times import waiting_by_rank

NAME = "stragglers"
OWN = "rank_throughput_per_s"


def draw(group: Group) -> Figure | None:
    """Draw two bars for each cell with a slowed rank, and for the same cell without it. None if no cell has a slowed rank."""
    twins = {without_faults(mark.row.cell) for mark in group.marks if mark.cell.cell.instruments.straggler is not None}
    shown, left_out = some(
        group,
        lambda mark: (
            mark.cell.cell.instruments.lost_worker is None
            and without_faults(mark.row.cell) in twins
            and bool(_steps(mark))
            and OWN in mark.row.metrics
        ),
    )
    if not any(mark.cell.cell.instruments.straggler is not None for mark in shown.marks):
        return None
    marks = shown.marks
    parts = [_parts(mark) for mark in marks]
    steps = [
        BarPart(name, colour, [part[place] for part in parts])
        for place, (name, colour) in enumerate(
            (("work", "var(--series-1)"), ("delay on purpose", "var(--series-3)"), ("waiting for others", "var(--series-2)"))
        )
    ]
    unit = marks[0].row.metrics[OWN].unit
    rates = [mark.row.metrics[OWN].value for mark in marks]
    caption = (
        "Left: a step, mean over ranks and repeats, so a delay of one rank counts by its share. Waiting is what forward, "
        "backward and update take longer than on the rank where they are the shortest. At the end: the longest waiting of a "
        "rank in ms. Right: the sum of the rates of the ranks, each over its own time. A cell with a slowed rank is no "
        f"ordinary run; its name says so.{left_out}"
    )
    ends = [notation.number(max(_waits(mark)), 2) for mark in marks]
    panels = [
        BarPanel("ms per step", "ms", steps, ends),
        BarPanel(unit, unit, [BarPart("throughput of the ranks", "var(--series-4)", rates)], [_rate(rate) for rate in rates]),
    ]
    return stacked(NAME, "Steps with a rank that is slowed on purpose", caption, shown, panels)


def _rate(rate: float) -> str:
    return notation.number(rate, 3)


def _waits(mark: CellMark) -> list[float]:
    """The waiting of each rank in ms per step, mean over repeats."""
    of_runs = [waiting_by_rank(run) for run in mark.cell.completed]
    return [statistics.fmean(one[rank] for one in of_runs) for rank in of_runs[0]]


def _steps(mark: CellMark) -> list[float]:
    """The median step of each rank and repeat, in ms; empty if the waiting is not known."""
    if not all(waiting_by_rank(run) for run in mark.cell.completed):
        return []
    medians = [run.timed.group_by("rank").agg(pl.col("step_ms").median())["step_ms"] for run in mark.cell.completed]
    return [ms for of_run in medians for ms in of_run.to_list()]


def _parts(mark: CellMark) -> tuple[float, float, float]:
    """Milliseconds of a step, mean over ranks: work, delay on purpose, and waiting for other ranks."""
    asked = mark.cell.cell.instruments.straggler
    delay = asked.delay_ms / mark.cell.cell.gpus if asked is not None else 0.0
    waiting = statistics.fmean(_waits(mark))
    return max(statistics.fmean(_steps(mark)) - delay - waiting, 0.0), delay, waiting
