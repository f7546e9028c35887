"""Defines what all figures of the report share: the cells of a workload, the look of each cell, and the colours.

Colours are the page's CSS variables, such as ``var(--series-1)``; the page resolves them for light mode, dark mode and print.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from collect.findings.columns import make_row_labels
from collect.findings.row import CellRow
from collect.loading.loaded_run import LoadedRun
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.strategy_style import COLOURS, Look, choose_looks, make_strategy_look
from collect.summary import Summary
from shardlab.matrix.cell import AnyCell

INK, MUTED, LINE = "var(--ink)", "var(--muted)", "var(--line)"
SERIES = {number: f"var(--series-{number})" for number in range(1, COLOURS + 1)}  # number of a series colour -> the colour
MAX_MARKED = 40  # up to so many points, each gets a mark: without marks, a point between gaps is invisible
# How much a reader can tell apart in one plot. Of a figure with more, small multiples are made (drawing/small_multiples.py).
MOST_SHOWN = 12  # lines: with more, looks differ only in details, and at 390 px the legend is larger than the plot
MOST_ROWS = 24  # rows, such as bars: 24 rows are 576 px high, so that the axis is still on the screen of a phone
MOST_CELLS = 100  # the most cells of a workload that are drawn: the largest study has 59 cells; a longer legend is not readable
PLAYED = ", played"  # suffix of the title of a panel or the name of a line whose values a stub of NVML made up
PICTURE_PX, TITLE_PX = {False: 640, True: 1000}, 44  # width of a narrow and of a wide image file; height of its title
LEGEND_PX, LINE_PX = 200, 20  # for the legend of an image file: approximate width of a name, and height of a line of names


class Figure(msgspec.Struct):
    """A figure of the report. `data` and `layout` have the form that plotly expects.

    `meta` of a trace is the id of the cell that it shows, or a list with an id for each of its points.
    """

    name: str
    title: str
    caption: str
    height_px: int
    """The width is not fixed: a figure fills the width of the page."""
    data: list[dict[str, Any]]
    layout: dict[str, Any]

    @property
    def cells(self) -> list[str]:
        """The ids of the cells that the figure shows, each once, in the order in which they are drawn."""
        trace_metas = [trace["meta"] for trace in self.data if "meta" in trace]
        return list(dict.fromkeys(cell_id for meta in trace_metas for cell_id in ([meta] if isinstance(meta, str) else meta)))


class CellMark(msgspec.Struct, frozen=True):
    """A cell, and how figures draw it."""

    label: str
    """Name of the cell in the figure, HTML-escaped because plotly interprets some HTML tags in every text."""
    strategy_number: int
    """Number of the cell's strategy in the list of all strategies of the report, from 0."""
    look: Look
    """Colour, shape and dash."""
    row: CellRow
    cell: LoadedCell

    @property
    def first_run(self) -> LoadedRun | None:
        """The first completed repeat; None if no repeat completed."""
        return next(iter(self.cell.completed_runs), None)

    @property
    def unresumed_run(self) -> LoadedRun | None:
        """The first completed repeat that did not resume from a checkpoint; None if there is no such repeat."""
        return next((run for run in self.cell.completed_runs if not run.resumed), None)


class WorkloadGroup(msgspec.Struct, frozen=True):
    """The cells of one workload. A figure shows the cells of one group.

    Each workload has its own figures, because units, losses and step times of different models cannot be compared.
    """

    workload: str
    baseline: str
    marks: list[CellMark]
    left_out: int = 0
    """Number of cells of the workload that figures do not show, because there are more than MOST_CELLS."""

    @property
    def labels(self) -> list[str]:
        """The label of each cell, in the order of `marks`."""
        return [mark.label for mark in self.marks]

    @property
    def pairs_with_baselines(self) -> list[tuple[CellMark, CellMark]]:
        """(cell, its baseline) for each cell that has another cell of the group as its baseline."""
        mark_by_id = {mark.row.id: mark for mark in self.marks}
        pairs = [(mark, mark_by_id.get(mark.row.baseline or "")) for mark in self.marks]
        return [(mark, baseline) for mark, baseline in pairs if baseline is not None and baseline is not mark]


def escape(text: str) -> str:
    """The text, with escapes for what plotly would interpret as HTML."""
    return html.escape(text, quote=False)


def describe_rest(left_out_count: int, noun: str = "cells") -> str:
    """A sentence for a caption about things that the figure does not draw; "" if there are none."""
    return f" {left_out_count} more {noun} are not drawn." if left_out_count > 0 else ""


def note_played(labels: Sequence[str]) -> str:
    """A sentence for a caption that names the cells whose GPU values a stub of NVML made up; "" if `labels` is empty.

    labels: the labels of these cells.
    """
    return f" Played: the GPUs of {', '.join(labels)} are a stub of NVML, so no GPU had these values." if labels else ""


def group_by_workload(loaded: LoadedMatrix, summary: Summary) -> list[WorkloadGroup]:
    """Group the cells of the matrix by workload.

    A strategy has the same colour and shape in all groups. Inside a group, the cells of one strategy differ in fill and dash.
    """
    number_by_strategy: dict[str, int] = {}
    for row in summary.rows:
        number_by_strategy.setdefault(row.cell["strategy"], len(number_by_strategy))
    entries_by_workload: dict[str, list[tuple[CellRow, LoadedCell]]] = {}
    for row, cell in zip(summary.rows, loaded.cells, strict=True):
        entries_by_workload.setdefault(cell.cell.workload, []).append((row, cell))
    workload_groups = []
    for workload, workload_entries in entries_by_workload.items():
        # cells with values first, in the order of the matrix
        by_values = sorted(range(len(workload_entries)), key=lambda index: not workload_entries[index][1].completed_runs)
        drawn_entries = [workload_entries[index] for index in sorted(by_values[:MOST_CELLS])]
        cell_labels = [escape(label) for label in make_row_labels([row for row, _ in drawn_entries])]
        strategy_numbers = [number_by_strategy[cell.cell.strategy] for _, cell in drawn_entries]
        marks = [
            CellMark(label, strategy_number, make_strategy_look(strategy_number), row, cell)
            for label, strategy_number, (row, cell) in zip(cell_labels, strategy_numbers, drawn_entries, strict=True)
        ]
        ordered = [mark for mark, _ in order_by_visibility(marks)]  # visible cells first: they get the simplest looks
        look_by_label = dict(
            zip((mark.label for mark in ordered), choose_looks([mark.strategy_number for mark in ordered]), strict=True)
        )
        marks = [msgspec.structs.replace(mark, look=look_by_label[mark.label]) for mark in marks]
        workload_groups.append(WorkloadGroup(workload, summary.baseline, marks, len(workload_entries) - len(drawn_entries)))
    return workload_groups


def order_by_visibility(marks: Sequence[CellMark]) -> list[tuple[CellMark, bool | str]]:
    """All marks, the visible ones first. Returns (mark, plotly's value of `visible` when the page opens) for each mark.

    If there are at most MOST_SHOWN cells, all are visible. Otherwise the visible cells are those with the largest number of
    ranks at which at least half of the strategies have a cell. If these are still too many, only the cells with the global
    batch size that most strategies use are visible. So a reader first sees different strategies side by side, and not many
    variants of the first strategy.
    """
    if len(marks) <= MOST_SHOWN:
        return [(mark, True) for mark in marks]
    marks_by_ranks = _group_marks(marks, lambda cell: cell.gpus)
    most = _count_strategies(marks)
    common_ranks = [ranks for ranks, rank_marks in marks_by_ranks.items() if 2 * _count_strategies(rank_marks) >= most]
    visible = marks_by_ranks[max(common_ranks or marks_by_ranks)]
    if len(visible) > MOST_SHOWN:
        visible = max(_group_marks(visible, lambda cell: cell.global_batch_size or 0).values(), key=_count_strategies)[
            :MOST_SHOWN
        ]
    visible_labels = {mark.label for mark in visible}
    return [(mark, True) for mark in visible] + [(mark, "legendonly") for mark in marks if mark.label not in visible_labels]


def make_image_layout(figure: Figure, title: str, is_wide: bool) -> dict[str, Any]:
    """The additional layout of a figure that is written as an image file: title, background, and size in pixels.

    If the figure has a legend, the title is set as the title of the legend, because plotly reserves space only for the legend.
    """
    legend_traces = [trace for trace in figure.data if trace.get("showlegend", True) and trace.get("visible") != "legendonly"]
    title_style = {"text": escape(title), "font": {"size": 16, "color": INK}}
    height_px = figure.height_px + TITLE_PX
    image_settings: dict[str, Any] = {"paper_bgcolor": "var(--raised)", "width": PICTURE_PX[is_wide], "height": height_px}
    image_settings |= {"margin": {"l": figure.layout["margin"]["l"] + 8, "r": 24, "t": TITLE_PX, "b": 48, "pad": 4}}
    if figure.layout["showlegend"]:
        legend_line_count = -(-len(legend_traces) * LEGEND_PX // PICTURE_PX[is_wide])
        legend_settings = figure.layout["legend"] | {"title": title_style | {"side": "top"}, "maxheight": 1}
        return image_settings | {"legend": legend_settings, "height": height_px + LINE_PX * legend_line_count}
    title_position = {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"}
    return image_settings | {"title": title_style | title_position | {"pad": {"t": 12, "l": 16}}}


def _group_marks(marks: Sequence[CellMark], get_key: Callable[[AnyCell], int]) -> dict[int, list[CellMark]]:
    marks_by_key: dict[int, list[CellMark]] = {}
    for mark in marks:
        marks_by_key.setdefault(get_key(mark.cell.cell), []).append(mark)
    return marks_by_key


def _count_strategies(marks: Sequence[CellMark]) -> int:
    return len({mark.cell.cell.strategy for mark in marks})
