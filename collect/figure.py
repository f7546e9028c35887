"""Defines what all figures of the report share: the layout, the look of each cell, and a limit on the number of points.

The limit keeps the page small, so that it opens fast. Colours are the page's CSS variables, such as ``var(--series-1)``; the
page resolves them for light mode, dark mode and print.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from collect.findings.columns import row_labels
from collect.findings.row import CellRow
from collect.findings.statistics import Estimate
from collect.reading.load import Loaded, LoadedCell
from collect.strategy_style import Look, strategy_look, variant_looks
from collect.summary import Summary
from shardlab.matrix.cell import Cell

INK, MUTED, LINE = "var(--ink)", "var(--muted)", "var(--line)"
MOST_TICKS = 8  # about the most ticks of an x axis that lists its ticks: at 390 px, more labels would lie on each other
MOST_POINTS = 600  # the most points of one line in a figure: about as many as a screen can show
MAX_MARKED = 40  # up to so many points, each gets a mark: without marks, a point between gaps is invisible
# How much a reader can tell apart in one plot. Of a figure with more, small multiples are made (drawing/small_multiples.py).
MOST_SHOWN = 12  # lines: with more, looks differ only in details, and at 390 px the legend is larger than the plot
MOST_ROWS = 24  # rows, such as bars: 24 rows are 576 px high, so that the axis is still on the screen of a phone
MOST_CELLS = 100  # the most cells of a workload that are drawn: the largest study has 59 cells; a longer legend is not readable
LEGEND_HEIGHT_PX = 132  # a higher legend scrolls; otherwise, on a phone, the legend would leave no room for the figure
LABELS_PX = 64  # space to the left of a plot, for the tick labels and the title of a numeric y axis
ROW_PX, DENSE_ROW_PX, MARGIN_PX = 34, 24, 76  # heights: of a row, of a row in a figure with many rows, of margins
PLAYED = ", played"  # suffix of the title of a panel or the name of a line whose values a stub of NVML made up
FEW_ROWS = 16  # a figure with more rows than this uses DENSE_ROW_PX
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
        metas = [trace["meta"] for trace in self.data if "meta" in trace]
        return list(dict.fromkeys(cell for meta in metas for cell in ([meta] if isinstance(meta, str) else meta)))


class CellMark(msgspec.Struct, frozen=True):
    """A cell, and how figures draw it."""

    label: str
    """Name of the cell in the figure, HTML-escaped because plotly interprets some HTML tags in every text."""
    strategy: int
    """Number of the cell's strategy in the list of all strategies of the report, from 0."""
    look: Look
    """Colour, shape and dash."""
    row: CellRow
    cell: LoadedCell


class Group(msgspec.Struct, frozen=True):
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


def played_note(labels: Sequence[str]) -> str:
    """A sentence for a caption that names the cells whose GPU values a stub of NVML made up; "" if `labels` is empty.

    labels: the labels of these cells.
    """
    return f" Played: the GPUs of {', '.join(labels)} are a stub of NVML, so no GPU had these values." if labels else ""


def groups(loaded: Loaded, summary: Summary) -> list[Group]:
    """Group the cells of the matrix by workload.

    A strategy has the same colour and shape in all groups. Inside a group, the cells of one strategy differ in fill and dash.
    """
    strategies: dict[str, int] = {}
    for row in summary.rows:
        strategies.setdefault(row.cell["strategy"], len(strategies))
    by_workload: dict[str, list[tuple[CellRow, LoadedCell]]] = {}
    for row, cell in zip(summary.rows, loaded.cells, strict=True):
        by_workload.setdefault(cell.cell.workload, []).append((row, cell))
    workload_groups = []
    for workload, workload_entries in by_workload.items():
        entries = workload_entries[:MOST_CELLS]
        names = [html.escape(name, quote=False) for name in row_labels([row for row, _ in entries])]
        strategy_numbers = [strategies[cell.cell.strategy] for _, cell in entries]
        marks = [
            CellMark(name, strategy_number, strategy_look(strategy_number), row, cell)
            for name, strategy_number, (row, cell) in zip(names, strategy_numbers, entries, strict=True)
        ]
        ordered = [mark for mark, _ in order_by_visibility(marks)]  # visible cells first: they get the simplest looks
        looks = dict(zip((mark.label for mark in ordered), variant_looks([mark.strategy for mark in ordered]), strict=True))
        marks = [msgspec.structs.replace(mark, look=looks[mark.label]) for mark in marks]
        workload_groups.append(Group(workload, summary.baseline, marks, len(workload_entries) - len(entries)))
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
    by_ranks = _group_marks(marks, lambda cell: cell.gpus)
    common = [ranks for ranks, rank_marks in by_ranks.items() if 2 * _count_strategies(rank_marks) >= _count_strategies(marks)]
    visible = by_ranks[max(common or by_ranks)]
    if len(visible) > MOST_SHOWN:
        visible = max(_group_marks(visible, lambda cell: cell.global_batch_size).values(), key=_count_strategies)[:MOST_SHOWN]
    visible_labels = {mark.label for mark in visible}
    return [(mark, True) for mark in visible] + [(mark, "legendonly") for mark in marks if mark.label not in visible_labels]


def add_cell_id(mark: CellMark, traces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The traces, marked as showing this cell (`Figure.cells`)."""
    return [trace | {"meta": mark.row.id} for trace in traces]


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """The settings of an axis. title: its title with the unit. settings: plotly's settings that override the defaults."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": MUTED}, "standoff": 8},
        "gridcolor": LINE,
        "linecolor": LINE,
        "zeroline": False,
        "automargin": True,
        "tickfont": {"size": 12, "color": MUTED},
        "fixedrange": True,  # on a phone, a finger must scroll the page and not move the axis
    } | settings


def thin_ticks(x: dict[str, Any], max_ticks: int = MOST_TICKS) -> dict[str, Any]:
    """The x axis without listed ticks that are nearer to the tick before them than the axis divided by `max_ticks`."""
    if "tickvals" not in x:
        return x
    ticks = sorted(x["tickvals"])
    positions = [math.log(tick) if x.get("type") == "log" else tick for tick in ticks]
    indexes: list[int] = []
    for index in range(len(ticks)):
        if not indexes or positions[index] - positions[indexes[-1]] >= 0.999 * (positions[-1] - positions[0]) / max_ticks:
            indexes.append(index)
    return x | {"tickvals": [ticks[index] for index in indexes], "ticktext": [f"{ticks[index]:g}" for index in indexes]}


def layout(x: dict[str, Any], y: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The layout of a figure with axes `x` and `y`: no background, no frame, and margins only as large as the labels need.

    settings: other settings of plotly, which override the defaults.
    """
    left_px = 8
    if settings.get("showlegend") and y.get("automargin") and y.get("type") != "category":
        # plotly chooses the ticks of a y axis from the height of the plot. The height depends on the number of lines in the
        # legend, and this number depends on the width that the tick labels leave. If the margin also depended on the labels,
        # plotly might never finish, so the margin is fixed.
        left_px, y = LABELS_PX, y | {"automargin": False}
        settings |= {name: y_axis | {"automargin": False} for name, y_axis in settings.items() if name.startswith("yaxis")}
    return {
        "xaxis": x,
        "yaxis": y,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        "margin": {"l": left_px, "r": 16, "t": 8, "b": 44, "pad": 4},
        "hoverlabel": {"bgcolor": "var(--raised)", "bordercolor": LINE, "font": {"color": INK, "size": 12}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12}}
        | {"maxheight": LEGEND_HEIGHT_PX},
        "showlegend": False,
        "dragmode": False,
    } | settings


def image_layout(figure: Figure, title: str, wide: bool) -> dict[str, Any]:
    """The additional layout of a figure that is written as an image file: title, background, and size in pixels.

    If the figure has a legend, the title is set as the title of the legend, because plotly reserves space only for the legend.
    """
    legend_traces = [trace for trace in figure.data if trace.get("showlegend", True) and trace.get("visible") != "legendonly"]
    heading = {"text": html.escape(title, quote=False), "font": {"size": 16, "color": INK}}
    height = figure.height_px + TITLE_PX
    image_settings: dict[str, Any] = {"paper_bgcolor": "var(--raised)", "width": PICTURE_PX[wide], "height": height}
    image_settings |= {"margin": {"l": figure.layout["margin"]["l"] + 8, "r": 24, "t": TITLE_PX, "b": 48, "pad": 4}}
    if figure.layout["showlegend"]:
        legend_lines = -(-len(legend_traces) * LEGEND_PX // PICTURE_PX[wide])
        legend = figure.layout["legend"] | {"title": heading | {"side": "top"}, "maxheight": 1}
        return image_settings | {"legend": legend, "height": height + LINE_PX * legend_lines}
    title_position = {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"}
    return image_settings | {"title": heading | title_position | {"pad": {"t": 12, "l": 16}}}


def rows_layout(group: Group, x_title: str) -> dict[str, Any]:
    """The layout of a figure with one row per cell. The rows are from top to bottom in the order of the summary table."""
    y = axis("", type="category", categoryorder="array", categoryarray=list(reversed(group.labels)), showgrid=False)
    y |= {"tickfont": {"size": 13, "color": INK}, "range": [-0.6, len(group.marks) - 0.4]}
    return layout(axis(x_title, rangemode="tozero", nticks=5, tickangle=0), y)


def rows_height_px(group: Group) -> int:
    """The height in pixels of a figure with one row per cell."""
    return MARGIN_PX + (ROW_PX if len(group.marks) <= FEW_ROWS else DENSE_ROW_PX) * len(group.marks)


def state_trace(group: Group, valid: Sequence[bool]) -> dict[str, Any]:
    """A plotly trace for the cells without a value: it writes the state of each such cell, such as `oom`, into its row.

    valid: for each cell of the group, in the order of `marks`, whether the figure draws a value for this cell.
    """
    missing = [(mark.label, mark.row.state, mark.row.id) for mark, drawn in zip(group.marks, valid, strict=True) if not drawn]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [0] * len(missing),
        "y": [label for label, _, _ in missing],
        "text": [f"  {state}" for _, state, _ in missing],
        "meta": [cell for _, _, cell in missing],
        "textposition": "middle right",
        "textfont": {"color": MUTED, "size": 12},
        "hoverinfo": "skip",
        "cliponaxis": False,
    }


def _group_marks(marks: Sequence[CellMark], key: Callable[[Cell], int]) -> dict[int, list[CellMark]]:
    marks_by_key: dict[int, list[CellMark]] = {}
    for mark in marks:
        marks_by_key.setdefault(key(mark.cell.cell), []).append(mark)
    return marks_by_key


def _count_strategies(marks: Sequence[CellMark]) -> int:
    return len({mark.cell.cell.strategy for mark in marks})


def error_bar(estimate: Estimate, colour: str) -> dict[str, Any]:
    """An error bar of plotly along x that shows the 95 % interval of a mean; invisible if the interval is not known."""
    if estimate.low is None or estimate.high is None:
        return {"visible": False}
    return {
        "type": "data",
        "symmetric": False,
        "array": [estimate.high - estimate.value],
        "arrayminus": [estimate.value - estimate.low],
        "color": colour,
        "thickness": 1.5,
        "width": 4,
    }


def max_points_per_line(line_count: int) -> int:
    """The largest number of points that each line may have in a figure with `line_count` lines.

    The number is chosen so that the whole figure has at most MOST_SHOWN * MOST_POINTS points. But a line may always have 100
    points.
    """
    return max(MOST_POINTS * MOST_SHOWN // max(line_count, MOST_SHOWN), 100)


def thin_points(
    x: Sequence[float], y: Sequence[float | None], max_points: int = MOST_POINTS
) -> tuple[list[float], list[float | None]]:
    """Reduce the points of a line to at most about `max_points` points. Returns the x values and the y values that are kept.

    The points are divided into sections of equal size. Of each section, the points with the smallest and the largest y are
    kept, so that no peak is lost. If y is unknown (None) somewhere in the section, the first such point is kept too, so
    that no line is drawn across a gap."""
    if len(x) <= max_points:
        return list(x), list(y)
    size = -(-(2 if None not in y else 3) * len(x) // max_points)
    kept_indexes: list[int] = []
    for start in range(0, len(x), size):
        section = y[start : start + size]
        known_values = [(value, index) for index, value in enumerate(section, start) if value is not None]
        extremes = {min(known_values)[1], max(known_values)[1]} if known_values else set()
        kept_indexes += sorted(extremes | {start + section.index(None)} if None in section else extremes)
    return [x[index] for index in kept_indexes], [y[index] for index in kept_indexes]
