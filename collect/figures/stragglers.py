"""Draws what a rank that is slowed on purpose costs: the waiting of the ranks, and the throughput, beside ordinary cells."""

from __future__ import annotations

import statistics

import polars as pl

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import CellMark, Figure, Group
from collect.findings.comparability import key_without_faults
from collect.metrics.rank_times import waiting_by_rank

NAME = "stragglers"
RANK_THROUGHPUT = "rank_throughput_per_s"


def draw(group: Group) -> Figure | None:
    """Draw two bars for each cell with a slowed rank, and for the same cell without it. None if no cell has a slowed rank."""
    twins = {key_without_faults(mark.row.cell) for mark in group.marks if mark.cell.cell.instruments.straggler is not None}
    drawn_group, left_out_note = select_cells(
        group,
        lambda mark: (
            mark.cell.cell.instruments.lost_worker is None
            and key_without_faults(mark.row.cell) in twins
            and bool(_median_steps_ms(mark))
            and RANK_THROUGHPUT in mark.row.metrics
        ),
    )
    if not any(mark.cell.cell.instruments.straggler is not None for mark in drawn_group.marks):
        return None
    marks = drawn_group.marks
    parts = [_step_parts(mark) for mark in marks]
    steps = [
        BarPart(name, colour, [part[part_index] for part in parts])
        for part_index, (name, colour) in enumerate(
            (("work", "var(--series-1)"), ("delay on purpose", "var(--series-3)"), ("waiting for others", "var(--series-2)"))
        )
    ]
    unit = marks[0].row.metrics[RANK_THROUGHPUT].unit
    rates = [mark.row.metrics[RANK_THROUGHPUT].value for mark in marks]
    caption = (
        "Left: a step, mean over ranks and repeats, so a delay of one rank counts by its share. Waiting is what forward, "
        "backward and update take longer than on the rank where they are the shortest. At the end: the longest waiting of a "
        "rank in ms. Right: the sum of the rates of the ranks, each over its own time. A cell with a slowed rank is no "
        f"ordinary run; its name says so.{left_out_note}"
    )
    end_texts = [notation.format_number(max(_waits_ms(mark)), 2) for mark in marks]
    panels = [
        BarPanel("ms per step", "ms", steps, end_texts),
        BarPanel(
            unit, unit, [BarPart("throughput of the ranks", "var(--series-4)", rates)], [_format_rate(rate) for rate in rates]
        ),
    ]
    return draw_bars(NAME, "Steps with a rank that is slowed on purpose", caption, drawn_group, panels)


def _format_rate(rate: float) -> str:
    return notation.format_number(rate, 3)


def _waits_ms(mark: CellMark) -> list[float]:
    """The waiting of each rank in ms per step, mean over repeats."""
    waits_by_run = [waiting_by_rank(run) for run in mark.cell.completed]
    return [statistics.fmean(run_waits[rank] for run_waits in waits_by_run) for rank in waits_by_run[0]]


def _median_steps_ms(mark: CellMark) -> list[float]:
    """The median step of each rank and repeat, in ms; empty if the waiting is not known."""
    if not all(waiting_by_rank(run) for run in mark.cell.completed):
        return []
    medians = [run.timed.group_by("rank").agg(pl.col("step_ms").median())["step_ms"] for run in mark.cell.completed]
    return [ms for run_medians in medians for ms in run_medians.to_list()]


def _step_parts(mark: CellMark) -> tuple[float, float, float]:
    """Milliseconds of a step, mean over ranks: work, delay on purpose, and waiting for other ranks."""
    straggler = mark.cell.cell.instruments.straggler
    delay = straggler.delay_ms / mark.cell.cell.gpus if straggler is not None else 0.0
    waiting = statistics.fmean(_waits_ms(mark))
    return max(statistics.fmean(_median_steps_ms(mark)) - delay - waiting, 0.0), delay, waiting
