"""Draws parts of a whole as stacked bars, one bar per cell: the parts of a step's time, and the parts of memory.

A figure of parts is a row of data, a `PartsFigure`. If its bars need more than that, it is a function that ends with
`draw_bars`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from collect import notation
from collect.drawing.axes import axis, axis_name, layout
from collect.drawing.panel_rows import MIN_ROWS_PER_PANEL, rows
from collect.drawing.small_multiples import divide_cells
from collect.drawing.traces import horizontal_bars, scatter
from collect.figure import INK, MOST_ROWS, CellMark, Figure, Group, count_left_out

MOST_BARS = 60  # the most cells that a figure draws in one plot: nobody compares more cells at once
LABEL_PX, BAR_PX, GAP_PX = 20, 18, 12  # heights in a row: the name of the cell, the bar below it, and the space to the next row
LINE_PX = LABEL_PX + BAR_PX + GAP_PX
MARGIN_PX, LEGEND_PX = 70, 15  # LEGEND_PX: height for each name in the legend; a phone shows one or two names side by side
BETWEEN = 0.15  # space between two panels, as a share of the width of the figure
END_PX = 7  # width of one character of the text at the end of a bar

Entry = TypeVar("Entry")


class BarPart(NamedTuple):
    """One part of the stacked bars, with its value for each cell."""

    name: str
    colour: str
    values: Sequence[float | None]
    """The value for each cell of the group; None: the bar of this cell does not have the part."""


class BarPanel(NamedTuple):
    """A panel with one x axis and one stacked bar per cell."""

    x_title: str
    unit: str
    """The unit of the values, which is shown when the reader points at a bar."""
    parts: Sequence[BarPart]
    end_texts: Sequence[str]
    """For each cell, the text at the end of its bar."""
    estimates: Sequence[float | None] = ()
    """For each cell, the estimate, which is drawn as a vertical mark; None: no mark."""


class PartsFigure(msgspec.Struct, frozen=True):
    """A figure of parts of the time of a step: which cells have a bar, and which parts it has."""

    name: str
    title: str
    caption: str
    """What is drawn, and over which runs. The number of the cells that are not drawn is added."""
    parts: Callable[[CellMark], Mapping[str, float]]
    """The parts of the bar of a cell: {name of a part: milliseconds}; empty if the cell has no bar."""
    colours: Mapping[str, str]
    """Name of a part -> its colour, in the order in which the parts are stacked."""
    end_text: Callable[[CellMark], str] | None = None
    """The text at the end of the bar of a cell; None: the length of the bar."""
    x_title: str = "ms per step"

    def draw(self, group: Group) -> Figure | None:
        """Draw one bar for each cell that has parts; None if there are no parts."""
        drawn, left_out_note = select_cells(group, lambda mark: bool(self.parts(mark)))
        bars = [self.parts(mark) for mark in drawn.marks]
        end_texts = [self.end_text(mark) for mark in drawn.marks] if self.end_text else [sum_text(bar) for bar in bars]
        panel = BarPanel(self.x_title, "ms", stack_parts(bars, self.colours), end_texts)
        return draw_bars(self.name, self.title, self.caption + left_out_note, drawn, [panel]) if panel.parts else None


def sum_text(bar: Mapping[str, float], size: float = 1.0) -> str:
    """The length of a bar, to be written at its end. bar, size: as in `stack_parts`."""
    return notation.format_number(sum(bar.values()) / size, 3)


def stack_parts(
    bars: Sequence[Mapping[str, float] | None],
    colours: Mapping[str, str],
    size: float = 1.0,
    get_label: Callable[[str], str] = str,
) -> list[BarPart]:
    """The parts of the bars of a panel. A part that is 0 or unknown in all bars is left out.

    bars: for each bar, {name of a part: value}; None: not known. colours: {name of a part: its colour}. size: how many units of
    the values make one unit of the axis. get_label: gives the text of the legend for the name of a part.
    """
    return [
        BarPart(get_label(name), colour, [bar[name] / size if bar and name in bar else None for bar in bars])
        for name, colour in colours.items()
        if any(bar and bar.get(name) for bar in bars)
    ]


def select_cells(group: Group, is_drawn: Callable[[CellMark], bool]) -> tuple[Group, str]:
    """Select the cells that a figure draws: those for which `is_drawn` is true; if no panels divide them, the first MOST_BARS.

    Returns (a group of the selected cells, a sentence for the caption about the number of cells that are not drawn). The
    sentence is '' if all cells for which `is_drawn` is true are drawn.
    """
    marks, left_out_note = limit_entries([mark for mark in group.marks if is_drawn(mark)], lambda mark: mark)
    return msgspec.structs.replace(group, marks=marks), left_out_note


def limit_entries(entries: list[Entry], get_mark: Callable[[Entry], CellMark]) -> tuple[list[Entry], str]:
    """The entries of the rows of a figure that are drawn, and the sentence about the others, as in `select_cells`.

    get_mark: gives the cell of an entry.
    """
    if len(entries) <= MOST_BARS or divide_cells([get_mark(entry) for entry in entries], MOST_ROWS, MIN_ROWS_PER_PANEL):
        return entries, ""
    return entries[:MOST_BARS], count_left_out(len(entries) - MOST_BARS)


def labelled_rows_layout(labels: Sequence[str], label_px: int, line_px: int) -> dict[str, Any]:
    """The layout of a figure with one row per label, from top to bottom. Row n, counted from 0, reaches from y = n to y = n +
    1.

    The label of a row is at the top of the row, because a phone has no room for labels to the left of the bars.

    label_px: the height of a label; line_px: the height of a row.
    """
    y = axis("", range=[len(labels), 0], showticklabels=False, showgrid=False, ticks="")
    figure_layout = layout({}, y, showlegend=True)
    anchor = {"xref": "paper", "x": 0, "xanchor": "left", "xshift": -4, "yref": "y", "yanchor": "middle", "showarrow": False}
    figure_layout["annotations"] = [
        anchor | {"y": row + label_px / line_px / 2, "text": label, "font": {"size": 12, "color": INK}}
        for row, label in enumerate(labels)
    ]
    return figure_layout


def draw_bars(name: str, title: str, caption: str, group: Group, panels: Sequence[BarPanel]) -> Figure:
    """Draw panels of stacked bars side by side. All panels have the same rows, one per cell of the group; too many rows become
    small multiples.

    A panel without parts is left out, because it has no values from which the range of its x axis could follow.
    """
    panels = [panel for panel in panels if panel.parts]
    figure_layout = labelled_rows_layout(group.labels, LABEL_PX, LINE_PX)
    figure_layout |= {"barmode": "stack", "uniformtext": {"mode": "hide", "minsize": 10}}
    figure_layout["legend"] |= {"traceorder": "normal", "font": {"size": 11}}
    figure_layout["margin"]["r"] = END_PX * max(len(end) + 3 for panel in panels for end in panel.end_texts)
    data: list[dict[str, Any]] = []
    legend_names: set[str] = set()
    width = (1 - BETWEEN * (len(panels) - 1)) / len(panels)
    for index, panel in enumerate(panels):
        x_name, start = axis_name("x", index + 1), index * (width + BETWEEN)
        nticks = 5 if len(panels) == 1 else 3
        x_axis = axis(panel.x_title, rangemode="tozero", nticks=nticks, tickangle=0, domain=[start, start + width], anchor="y")
        figure_layout[axis_name("xaxis", index + 1)] = x_axis
        totals = [sum(value or 0 for value in bar) for bar in zip(*(part.values for part in panel.parts), strict=True)]
        traces = [_part_trace(group, part, panel, totals) for part in panel.parts]
        if any(estimate is not None for estimate in panel.estimates):
            traces.append(_estimate_trace(group, panel))
        for trace in traces:
            legend_group = {"legendgroup": trace["name"]} if len(panels) > 1 else {}
            data.append(trace | legend_group | {"xaxis": x_name, "showlegend": trace["name"] not in legend_names})
            legend_names.add(trace["name"])
        estimates = panel.estimates or [None] * len(totals)
        bar_ends = [max(total, estimate or 0) for total, estimate in zip(totals, estimates, strict=True)]
        data.append(end_trace(bar_ends, panel.end_texts) | {"xaxis": x_name})
    height_px = MARGIN_PX + LEGEND_PX * len(legend_names) + LINE_PX * len(group.marks)
    return rows(Figure(name, title, caption, height_px, data, figure_layout), group.marks)


def bar_middle(row: int) -> float:
    """The y coordinate of the middle of the bar in a row."""
    return row + (LABEL_PX + BAR_PX / 2) / LINE_PX


def _part_trace(group: Group, part: BarPart, panel: BarPanel, totals: Sequence[float]) -> dict[str, Any]:
    """One part of the bars of all cells. The share of the part in its bar is written inside the part if there is enough room.

    totals: the length of the bar of each cell.
    """
    known_values = [(row, value) for row, value in enumerate(part.values) if value is not None and totals[row]]
    marks = [group.marks[row] for row, _ in known_values]
    shares = [f"{notation.format_number(100 * value / totals[row], 3)} %" for row, value in known_values]
    bar_texts = [share if value < totals[row] else "" for share, (row, value) in zip(shares, known_values, strict=True)]
    has_several_parts = len(panel.parts) > 1
    share_text = ", %{customdata[1]} of the bar" if has_several_parts else ""
    return horizontal_bars(
        [value for _, value in known_values],
        [bar_middle(row) for row, _ in known_values],
        name=part.name,
        meta=[mark.row.id for mark in marks],
        customdata=[[mark.label, share] for mark, share in zip(marks, shares, strict=True)],
        marker={"color": part.colour},
        width=BAR_PX / LINE_PX,
        hovertemplate=f"{part.name}: %{{x:,.4~g}} {panel.unit}{share_text}<extra>%{{customdata[0]}}</extra>",
        text=bar_texts if has_several_parts else "",
        textposition="inside",
        textangle=0,
        insidetextanchor="middle",
    )


def _estimate_trace(group: Group, panel: BarPanel) -> dict[str, Any]:
    known_values = [(row, value) for row, value in enumerate(panel.estimates) if value is not None]
    return scatter(
        "markers",
        [value for _, value in known_values],
        [bar_middle(row) for row, _ in known_values],
        name="estimate",
        legendrank=2000,  # the estimate is the last entry of the legend
        customdata=[group.labels[row] for row, _ in known_values],
        marker={"symbol": "line-ns", "size": BAR_PX + 2, "line": {"color": INK, "width": 2.5}, "color": INK},
        hovertemplate=f"estimate: %{{x:,.4~g}} {panel.unit}<extra>%{{customdata}}</extra>",
        cliponaxis=False,
    )


def end_trace(bar_ends: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """The text to the right of each bar. bar_ends: the right ends of the bars."""
    y, shown_texts = [bar_middle(row) for row in range(len(bar_ends))], [f"  {text}" for text in texts]
    place = {"textposition": "middle right", "textfont": {"color": INK, "size": 12}, "cliponaxis": False}
    return scatter("text", bar_ends, y, text=shown_texts, hoverinfo="skip", showlegend=False, **place)
