"""Draws parts of a whole as stacked bars, one bar per cell: the parts of a step's time, and the parts of memory.

A figure of parts is a row of data, a `PartsFigure`. If its bars need more than that, it is a function that ends with
`draw_bars`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from collect.drawing.axes import make_axis, make_layout, name_axis
from collect.drawing.panel_rows import MIN_ROWS_PER_PANEL, split_rows
from collect.drawing.small_multiples import divide_cells
from collect.drawing.traces import make_horizontal_bars, make_points
from collect.figure import INK, MOST_ROWS, CellMark, Figure, WorkloadGroup, describe_rest
from shardlab.terminal import notation

MOST_BARS = 60  # the most cells that a figure draws in one plot: nobody compares more cells at once
LABEL_PX, BAR_PX, GAP_PX = 20, 18, 12  # heights in a row: the name of the cell, the bar below it, and the space to the next row
ROW_PX = LABEL_PX + BAR_PX + GAP_PX
MARGIN_PX, LEGEND_PX = 70, 15  # LEGEND_PX: height for each name in the legend; a phone shows one or two names side by side
PANEL_GAP = 0.15  # space between two panels, as a share of the width of the figure
END_CHAR_PX = 7  # width of one character of the text at the end of a bar

Entry = TypeVar("Entry")


class BarPanel(NamedTuple):
    """A panel with one x axis and one stacked bar per cell."""

    x_title: str
    unit: str
    """The unit of the axis, which is shown when the reader points at a bar."""
    bars: Sequence[Mapping[str, float] | None]
    """For each cell of the group, {name of a part: value}; None: not known."""
    colour_by_part: Mapping[str, str]
    """Name of a part -> its colour, in the order in which the parts are stacked."""
    end_texts: Sequence[str] | None = None
    """For each cell, the text at the end of its bar; None: the length of the bar."""
    unit_size: float = 1.0
    """How many units of the values make one unit of the axis."""
    estimates: Sequence[float | None] = ()
    """For each cell, the estimate, which is drawn as a vertical mark; None: no mark."""
    get_label: Callable[[str], str] = str
    """Gives the text of the legend for the name of a part."""

    @property
    def parts(self) -> list[tuple[str, str, list[float | None]]]:
        """(name, colour, length in the bar of each cell) of each part. A part that is 0 or unknown in all bars is left out."""
        return [
            (self.get_label(name), colour, [bar[name] / self.unit_size if bar and name in bar else None for bar in self.bars])
            for name, colour in self.colour_by_part.items()
            if any(bar and bar.get(name) for bar in self.bars)
        ]

    @property
    def shown_end_texts(self) -> Sequence[str]:
        """The text at the end of each bar."""
        if self.end_texts is not None:
            return self.end_texts
        return ["" if bar is None else notation.format_number(sum(bar.values()) / self.unit_size, 3) for bar in self.bars]


class PartsFigure(msgspec.Struct, frozen=True):
    """A figure of parts of the time of a step: which cells have a bar, and which parts it has."""

    name: str
    title: str
    caption: str
    """What is drawn, and over which runs. The number of the cells that are not drawn is added."""
    get_parts: Callable[[CellMark], Mapping[str, float]]
    """The parts of the bar of a cell: {name of a part: milliseconds}; empty if the cell has no bar."""
    colour_by_part: Mapping[str, str]
    """As in `BarPanel`."""
    get_end_text: Callable[[CellMark], str] | None = None
    """The text at the end of the bar of a cell; None: the length of the bar."""
    x_title: str = "ms per step"

    def draw(self, group: WorkloadGroup) -> Figure | None:
        """Draw one bar for each cell that has parts; None if there are no parts."""
        drawn_group, left_out_note = select_cells(group, lambda mark: bool(self.get_parts(mark)))
        end_texts = [self.get_end_text(mark) for mark in drawn_group.marks] if self.get_end_text else None
        panel = BarPanel(
            self.x_title, "ms", [self.get_parts(mark) for mark in drawn_group.marks], self.colour_by_part, end_texts
        )
        return draw_bars(self.name, self.title, self.caption + left_out_note, drawn_group, [panel]) if panel.parts else None


def select_cells(group: WorkloadGroup, is_drawn: Callable[[CellMark], bool]) -> tuple[WorkloadGroup, str]:
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
    return entries[:MOST_BARS], describe_rest(len(entries) - MOST_BARS)


def make_labelled_rows_layout(row_labels: Sequence[str], label_px: int, row_px: int) -> dict[str, Any]:
    """The layout of a figure with one row per label, from top to bottom. Row n, counted from 0, reaches from y = n to y = n +
    1.

    The label of a row is at the top of the row, because a phone has no room for labels to the left of the bars.

    label_px: the height of a label; row_px: the height of a row.
    """
    y_axis = make_axis("", range=[len(row_labels), 0], showticklabels=False, showgrid=False, ticks="")
    figure_layout = make_layout({}, y_axis, showlegend=True)
    anchor = {"xref": "paper", "x": 0, "xanchor": "left", "xshift": -4, "yref": "y", "yanchor": "middle", "showarrow": False}
    figure_layout["annotations"] = [
        anchor | {"y": row + label_px / row_px / 2, "text": label, "font": {"size": 12, "color": INK}}
        for row, label in enumerate(row_labels)
    ]
    return figure_layout


def draw_bars(figure_name: str, title: str, caption: str, group: WorkloadGroup, panels: Sequence[BarPanel]) -> Figure:
    """Draw panels of stacked bars side by side. All panels have the same rows, one per cell of the group; too many rows become
    small multiples.

    A panel without parts is left out, because it has no values from which the range of its x axis could follow.
    """
    panels = [panel for panel in panels if panel.parts]
    layout = make_labelled_rows_layout(group.labels, LABEL_PX, ROW_PX)
    layout |= {"barmode": "stack", "uniformtext": {"mode": "hide", "minsize": 10}}
    layout["legend"] |= {"traceorder": "normal", "font": {"size": 11}}
    layout["margin"]["r"] = END_CHAR_PX * max(len(text) + 3 for panel in panels for text in panel.shown_end_texts)
    traces: list[dict[str, Any]] = []
    legend_names: set[str] = set()
    width = (1 - PANEL_GAP * (len(panels) - 1)) / len(panels)
    for index, panel in enumerate(panels):
        x_name, left_edge = name_axis("x", index + 1), index * (width + PANEL_GAP)
        x_axis = make_axis(panel.x_title, rangemode="tozero", tickangle=0, domain=[left_edge, left_edge + width], anchor="y")
        layout[name_axis("xaxis", index + 1)] = x_axis | {"nticks": 5 if len(panels) == 1 else 3}
        for trace in _make_panel_traces(group, panel):
            if part_name := trace.get("name", ""):
                legend_group = {"legendgroup": part_name} if len(panels) > 1 else {}
                trace |= legend_group | {"showlegend": part_name not in legend_names}
                legend_names.add(part_name)
            traces.append(trace | {"xaxis": x_name})
    height_px = MARGIN_PX + LEGEND_PX * len(legend_names) + ROW_PX * len(group.marks)
    return split_rows(Figure(figure_name, title, caption, height_px, traces, layout), group.marks)


def locate_bar(row: int) -> float:
    """The y coordinate of the middle of the bar in a row."""
    return row + (LABEL_PX + BAR_PX / 2) / ROW_PX


def _make_panel_traces(group: WorkloadGroup, panel: BarPanel) -> list[dict[str, Any]]:
    """The parts of the bars of all cells, the marks at the estimates, and the texts at the ends of the bars.

    The share of a part in its bar is written inside the part if there is enough room.
    """
    parts, traces = panel.parts, []
    totals = [sum(lengths[row] or 0 for _, _, lengths in parts) for row in range(len(group.marks))]
    text_settings = {"textposition": "inside", "textangle": 0, "insidetextanchor": "middle"}
    share_text = ", %{customdata[1]} of the bar" if len(parts) > 1 else ""
    for part, colour, lengths in parts:
        values = [(mark, row, lengths[row] or 0.0) for row, mark in enumerate(group.marks) if lengths[row] is not None]
        values = [(mark, row, length) for mark, row, length in values if totals[row]]
        shares = [f"{notation.format_number(100 * length / totals[row], 3)} %" for _, row, length in values]
        shown_shares = [share if length < totals[row] else "" for share, (_, row, length) in zip(shares, values, strict=True)]
        bar_style = {"marker": {"color": colour}, "width": BAR_PX / ROW_PX, "text": shown_shares if len(parts) > 1 else ""}
        hover = f"{part}: %{{x:,.4~g}} {panel.unit}{share_text}<extra>%{{customdata[0]}}</extra>"
        bar_style |= {"customdata": [[mark.label, share] for share, (mark, _, _) in zip(shares, values, strict=True)]}
        x, y = [length for _, _, length in values], [locate_bar(row) for _, row, _ in values]
        cell_ids = [mark.row.id for mark, _, _ in values]
        traces.append(make_horizontal_bars(x, y, name=part, meta=cell_ids, hovertemplate=hover, **bar_style, **text_settings))
    estimates = [(row, estimate / panel.unit_size) for row, estimate in enumerate(panel.estimates) if estimate is not None]
    if estimates:
        x, y = [estimate for _, estimate in estimates], [locate_bar(row) for row, _ in estimates]
        marker = {"symbol": "line-ns", "size": BAR_PX + 2, "line": {"color": INK, "width": 2.5}, "color": INK}
        hover = f"estimate: %{{x:,.4~g}} {panel.unit}<extra>%{{customdata}}</extra>"
        place = {"customdata": [group.labels[row] for row, _ in estimates], "hovertemplate": hover, "cliponaxis": False}
        traces.append(make_points("markers", x, y, name="estimate", legendrank=2000, marker=marker, **place))  # last
    lengths_with_estimates = [max(total_length, dict(estimates).get(row, 0)) for row, total_length in enumerate(totals)]
    return [*traces, make_end_trace(lengths_with_estimates, panel.shown_end_texts)]


def make_end_trace(bar_ends: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """The text to the right of each bar. bar_ends: the right ends of the bars."""
    bar_positions, shown_texts = [locate_bar(row) for row in range(len(bar_ends))], [f"  {text}" for text in texts]
    text_settings = {"textposition": "middle right", "textfont": {"color": INK, "size": 12}, "cliponaxis": False}
    return make_points("text", bar_ends, bar_positions, text=shown_texts, hoverinfo="skip", showlegend=False, **text_settings)
