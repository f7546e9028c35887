"""What all figures share: one look, one colour per strategy, and few enough points to open at once.

Colours are the page's CSS variables, such as ``var(--series-1)``; the page resolves them for light, dark and print.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec

from collect.columns import labels
from collect.load import Loaded, LoadedCell
from collect.row import Row
from collect.summary import Summary

SERIES = 7  # colours of the page, told apart also without red or green
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
INK, MUTED, LINE = "var(--ink)", "var(--muted)", "var(--line)"
MOST_POINTS = 600  # of a line: about what a screen can show
MOST_SHOWN = 12  # lines that are drawn at first; the others wait in the legend
ROW_PX, MARGIN_PX = 34, 76
PICTURE_PX, TITLE_PX = {False: 640, True: 1000}, 44
LEGEND_PX, LINE_PX = 200, 20  # about what a name in a legend takes of a picture's width, and a line of them of its height


class Figure(msgspec.Struct):
    """A figure as plotly takes it. height_px: it is as wide as the page lets it be."""

    name: str
    title: str
    caption: str
    height_px: int
    data: list[dict[str, Any]]
    layout: dict[str, Any]


class Look(msgspec.Struct, frozen=True):
    """How a cell is drawn in every figure: colour by strategy, symbol and dash by all else."""

    colour: str
    symbol: str
    dash: str


class Mark(msgspec.Struct, frozen=True):
    """A cell as figures show it. label: escaped, as plotly reads some tags in any text."""

    label: str
    look: Look
    row: Row
    cell: LoadedCell


class Group(msgspec.Struct, frozen=True):
    """The cells of one workload: units, losses and step times of different models do not compare."""

    workload: str
    baseline: str
    marks: list[Mark]

    @property
    def labels(self) -> list[str]:
        return [mark.label for mark in self.marks]


def groups(loaded: Loaded, summary: Summary) -> list[Group]:
    """The matrix by workload; a strategy has the same colour in all groups."""
    colours: dict[str, int] = {}
    for row in summary.rows:
        colours.setdefault(row.cell["strategy"], len(colours))
    by_workload: dict[str, list[tuple[Row, LoadedCell]]] = {}
    for row, cell in zip(summary.rows, loaded.cells, strict=True):
        by_workload.setdefault(cell.cell.workload, []).append((row, cell))
    found = []
    for workload, entries in by_workload.items():
        variants: dict[str, int] = {}
        marks = []
        for label, (row, cell) in zip(labels([row for row, _ in entries]), entries, strict=True):
            strategy = cell.cell.strategy
            variant = variants[strategy] = variants.get(strategy, -1) + 1
            colour = f"var(--series-{colours[strategy] % SERIES + 1})"
            look = Look(colour, SYMBOLS[variant % len(SYMBOLS)], DASHES[variant % len(DASHES)])
            marks.append(Mark(html.escape(label, quote=False), look, row, cell))
        found.append(Group(workload, summary.baseline, marks))
    return found


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its unit in the title."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": MUTED}, "standoff": 8},
        "gridcolor": LINE,
        "linecolor": LINE,
        "zeroline": False,
        "automargin": True,
        "tickfont": {"size": 12, "color": MUTED},
        "fixedrange": True,  # a finger on a phone scrolls the page, not the axis
    } | more


def layout(x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The look without plotly's own: no background, no frame, room for the labels only."""
    return {
        "xaxis": x,
        "yaxis": y,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        "margin": {"l": 8, "r": 16, "t": 8, "b": 44, "pad": 4},
        "hoverlabel": {"bgcolor": "var(--raised)", "bordercolor": LINE, "font": {"color": INK, "size": 12}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "showlegend": False,
        "dragmode": False,
    } | more


def picture(found: Figure, title: str, wide: bool) -> dict[str, Any]:
    """What the layout has besides where the figure stands alone: its title, a ground to stand on, and a size in px.

    Above a legend, the title is the legend's: plotly makes room for that one alone.
    """
    shown = [trace for trace in found.data if trace.get("showlegend", True) and trace.get("visible") != "legendonly"]
    heading = {"text": html.escape(title, quote=False), "font": {"size": 16, "color": INK}}
    height = found.height_px + TITLE_PX
    alone: dict[str, Any] = {"paper_bgcolor": "var(--raised)", "width": PICTURE_PX[wide], "height": height}
    alone |= {"margin": {"l": 16, "r": 24, "t": TITLE_PX, "b": 48, "pad": 4}}
    if found.layout["showlegend"]:
        lines = -(-len(shown) * LEGEND_PX // PICTURE_PX[wide])
        legend = found.layout["legend"] | {"title": heading | {"side": "top"}, "maxheight": 1}
        return alone | {"legend": legend, "height": height + LINE_PX * lines}
    place = {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"}
    return alone | {"title": heading | place | {"pad": {"t": 12, "l": 16}}}


def by_cell(group: Group, x_title: str) -> dict[str, Any]:
    """The layout of a figure with one line of text per cell, from the top down as in the table."""
    y = axis("", type="category", categoryorder="array", categoryarray=list(reversed(group.labels)), showgrid=False)
    y |= {"tickfont": {"size": 13, "color": INK}, "range": [-0.6, len(group.marks) - 0.4]}
    return layout(axis(x_title, rangemode="tozero", nticks=5, tickangle=0), y)


def by_cell_height(group: Group) -> int:
    return MARGIN_PX + ROW_PX * len(group.marks)


def states(group: Group, drawn: Sequence[bool]) -> dict[str, Any]:
    """In place of a mark, the state of the cells that have no number: the result of those is that they have none."""
    missing = [(mark.label, mark.row.state) for mark, has in zip(group.marks, drawn, strict=True) if not has]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [0] * len(missing),
        "y": [label for label, _ in missing],
        "text": [f"  {state}" for _, state in missing],
        "textposition": "middle right",
        "textfont": {"color": MUTED, "size": 12},
        "hoverinfo": "skip",
        "cliponaxis": False,
    }


def thin(x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS) -> tuple[list[float], list[float | None]]:
    """At most about `most` points: the smallest and the largest of each stretch, so that no peak is lost."""
    if len(x) <= most:
        return list(x), list(y)
    size = -(-2 * len(x) // most)
    kept: list[int] = []
    for start in range(0, len(x), size):
        known = [(value, index) for index, value in enumerate(y[start : start + size], start) if value is not None]
        kept += sorted({min(known)[1], max(known)[1]}) if known else [start]
    return [x[index] for index in kept], [y[index] for index in kept]
