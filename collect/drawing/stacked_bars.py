"""Draws stacked bars, one bar per cell. Figures use them for the parts of a step's time and for the parts of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from collect import notation
from collect.drawing.panel_rows import FEWEST, rows
from collect.drawing.small_multiples import of_cells
from collect.figure import INK, MOST_ROWS, CellMark, Figure, Group, axis, layout

MOST_BARS = 60  # the most cells that a figure draws in one plot: nobody compares more cells at once
LABEL_PX, BAR_PX, GAP_PX = 20, 18, 12  # heights in a row: the name of the cell, the bar below it, and the space to the next row
MARGIN_PX, LEGEND_PX = 70, 15  # LEGEND_PX: height for each name in the legend; a phone shows one or two names side by side
BETWEEN = 0.15  # space between two panels, as a share of the width of the figure
END_PX = 7  # width of one character of the text at the end of a bar

Entry = TypeVar("Entry")


class BarPart(NamedTuple):
    """One part of the stacked bars, with its value for each cell."""

    name: str
    colour: str
    values: Sequence[float | None]  # the value for each cell of the group; None: the bar of this cell does not have the part


class BarPanel(NamedTuple):
    """A panel with one x axis and one stacked bar per cell."""

    x_title: str
    unit: str  # the unit of the values, which is shown when the reader points at a bar
    parts: Sequence[BarPart]
    ends: Sequence[str]  # for each cell, the text at the end of its bar
    estimates: Sequence[float | None] = ()  # for each cell, the estimate, which is drawn as a vertical mark; None: no mark


def some(group: Group, has: Callable[[CellMark], bool]) -> tuple[Group, str]:
    """Select the cells that a figure draws: those for which `has` is true; if no panels divide them, the first MOST_BARS.

    Returns (a group of the selected cells, a sentence for the caption about the number of cells that are not drawn). The
    sentence is '' if all cells for which `has` is true are drawn.
    """
    marks, left_out = bounded([mark for mark in group.marks if has(mark)], lambda mark: mark)
    return msgspec.structs.replace(group, marks=marks), left_out


def bounded(entries: list[Entry], mark_of: Callable[[Entry], CellMark]) -> tuple[list[Entry], str]:
    """The entries of the rows of a figure that are drawn, and the sentence about the others, as in `some`.

    mark_of: gives the cell of an entry.
    """
    if len(entries) <= MOST_BARS or of_cells([mark_of(entry) for entry in entries], MOST_ROWS, FEWEST):
        return entries, ""
    return entries[:MOST_BARS], f" {len(entries) - MOST_BARS} more cells are not drawn."


def lines(labels: Sequence[str], label_px: int, line_px: int) -> dict[str, Any]:
    """The layout of a figure with one row per label, from top to bottom. Row n, counted from 0, reaches from y = n to y = n +
    1.

    The label of a row is at the top of the row, because a phone has no room for labels to the left of the bars.

    label_px: the height of a label; line_px: the height of a row.
    """
    y = axis("", range=[len(labels), 0], showticklabels=False, showgrid=False, ticks="")
    shape = layout({}, y, showlegend=True)
    at = {"xref": "paper", "x": 0, "xanchor": "left", "xshift": -4, "yref": "y", "yanchor": "middle", "showarrow": False}
    shape["annotations"] = [
        at | {"y": line + label_px / line_px / 2, "text": label, "font": {"size": 12, "color": INK}}
        for line, label in enumerate(labels)
    ]
    return shape


def draw(name: str, title: str, caption: str, group: Group, panels: Sequence[BarPanel]) -> Figure:
    """Draw panels of stacked bars side by side. All panels have the same rows, one per cell of the group; too many rows become
    small multiples.

    A panel without parts is left out, because it has no values from which the range of its x axis could follow.
    """
    panels = [panel for panel in panels if panel.parts]
    line_px = LABEL_PX + BAR_PX + GAP_PX
    shape = lines(group.labels, LABEL_PX, line_px)
    shape |= {"barmode": "stack", "uniformtext": {"mode": "hide", "minsize": 10}}
    shape["legend"] |= {"traceorder": "normal", "font": {"size": 11}}
    shape["margin"]["r"] = END_PX * max(len(end) + 3 for panel in panels for end in panel.ends)
    data: list[dict[str, Any]] = []
    named: set[str] = set()
    width = (1 - BETWEEN * (len(panels) - 1)) / len(panels)
    for place, panel in enumerate(panels):
        number = str(place + 1) if place else ""
        start = place * (width + BETWEEN)
        nticks = 5 if len(panels) == 1 else 3
        over = axis(panel.x_title, rangemode="tozero", nticks=nticks, tickangle=0, domain=[start, start + width], anchor="y")
        shape[f"xaxis{number}"] = over
        totals = [sum(value or 0 for value in bar) for bar in zip(*(part.values for part in panel.parts), strict=True)]
        drawn = [_part(group, part, panel, totals) for part in panel.parts]
        if any(estimate is not None for estimate in panel.estimates):
            drawn.append(_estimates(group, panel))
        for entry in drawn:
            shared = {"legendgroup": entry["name"]} if len(panels) > 1 else {}
            data.append(entry | shared | {"xaxis": f"x{number}", "showlegend": entry["name"] not in named})
            named.add(entry["name"])
        data.append(_ends(panel, totals) | {"xaxis": f"x{number}"})
    height_px = MARGIN_PX + LEGEND_PX * len(named) + line_px * len(group.marks)
    return rows(Figure(name, title, caption, height_px, data, shape), group.marks)


def _middle(line: int) -> float:
    """The y coordinate of the middle of the bar in a row."""
    return line + (LABEL_PX + BAR_PX / 2) / (LABEL_PX + BAR_PX + GAP_PX)


def _part(group: Group, part: BarPart, panel: BarPanel, totals: Sequence[float]) -> dict[str, Any]:
    """One part of the bars of all cells. The share of the part in its bar is written inside the part if there is enough room.

    totals: the length of the bar of each cell.
    """
    known = [(line, value) for line, value in enumerate(part.values) if value is not None and totals[line]]
    shares = [f"{notation.number(100 * value / totals[line], 3)} %" for line, value in known]
    written = [share if value < totals[line] else "" for share, (line, value) in zip(shares, known, strict=True)]
    one_of_many = len(panel.parts) > 1
    share = ", %{customdata[1]} of the bar" if one_of_many else ""
    return {
        "type": "bar",
        "orientation": "h",
        "name": part.name,
        "x": [value for _, value in known],
        "y": [_middle(line) for line, _ in known],
        "meta": [group.marks[line].row.id for line, _ in known],
        "customdata": [[group.labels[line], share] for share, (line, _) in zip(shares, known, strict=True)],
        "text": written if one_of_many else "",
        "textposition": "inside",
        "textangle": 0,
        "insidetextanchor": "middle",
        "marker": {"color": part.colour},
        "width": BAR_PX / (LABEL_PX + BAR_PX + GAP_PX),
        "hovertemplate": f"{part.name}: %{{x:,.4~g}} {panel.unit}{share}<extra>%{{customdata[0]}}</extra>",
    }


def _estimates(group: Group, panel: BarPanel) -> dict[str, Any]:
    known = [(line, value) for line, value in enumerate(panel.estimates) if value is not None]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "estimate",
        "legendrank": 2000,  # the estimate is the last entry of the legend
        "x": [value for _, value in known],
        "y": [_middle(line) for line, _ in known],
        "customdata": [group.labels[line] for line, _ in known],
        "marker": {"symbol": "line-ns", "size": BAR_PX + 2, "line": {"color": INK, "width": 2.5}, "color": INK},
        "hovertemplate": f"estimate: %{{x:,.4~g}} {panel.unit}<extra>%{{customdata}}</extra>",
        "cliponaxis": False,
    }


def _ends(panel: BarPanel, totals: Sequence[float]) -> dict[str, Any]:
    """The text to the right of each bar, or to the right of the estimate if the estimate is larger than the bar."""
    estimates = panel.estimates or [None] * len(totals)
    return {
        "type": "scatter",
        "mode": "text",
        "x": [max(total, estimate or 0) for total, estimate in zip(totals, estimates, strict=True)],
        "y": [_middle(line) for line in range(len(totals))],
        "text": [f"  {end}" for end in panel.ends],
        "textposition": "middle right",
        "textfont": {"color": INK, "size": 12},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
