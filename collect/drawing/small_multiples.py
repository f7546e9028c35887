"""Turns a crowded figure into small multiples: a panel per strategy, with the same axes in all panels.

A figure is crowded if it has more lines than MOST_SHOWN or more rows than MOST_ROWS. If a panel per strategy would be crowded
too, there is a panel per number of ranks, or per batch size. If no key gives readable panels, the figure stays one plot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from collect.drawing.axes import LEGEND_HEIGHT_PX, make_layout, name_axis, thin_ticks
from collect.drawing.panel_grid import HEAD_PX, MARGINS_PX, arrange_panels, grid_layout
from collect.drawing.traces import make_points, thin_points
from collect.figure import MOST_SHOWN, MUTED, CellMark, Figure, WorkloadGroup, escape, order_by_visibility
from collect.findings import columns
from collect.strategy_style import MOST_STRATEGIES, Look, make_strategy_look

KEYS = {"strategy": "strategy", "gpus": "number of ranks", "global_batch_size": "batch size"}  # a panel for each value of one
MOST_PANELS = 24
COLUMNS = 2  # two panels beside each other are readable at 390 px, and at 1280 px, where two figures share a row
LINES_PX = 380  # height of a figure of lines that is not divided
PLOT_PX, MARK_PX, LEGEND_LINE_PX = 112, 6, 22
MOST_TICKS = 4  # about the most ticks of the x axis of a panel that lists its ticks
GREY_POINTS = 2000  # about the most points of all grey lines of a panel together
GREY_LINE = {"color": MUTED, "width": 1}
GREY_OPACITY = 0.3


class PanelPlace(NamedTuple):
    """Where a line or a row of a crowded figure is drawn."""

    panel: str
    """The title of its panel, HTML-escaped."""
    variant: str
    """Its name inside the panel, HTML-escaped; equal variants look the same in all panels."""
    key_name: str
    """The key that gives the panels, in words."""


def divide_cells(marks: Sequence[CellMark], max_cells: int = MOST_SHOWN, min_cells: int = 1) -> dict[str, PanelPlace]:
    """Divide cells into panels. Returns {label of a cell: its place}; empty if `marks` are not crowded or if no key divides
    them into readable panels.

    max_cells: the most cells of a panel that is readable. min_cells: the fewest cells that panels must have on average.
    """
    if len(marks) <= max_cells:
        return {}
    for cell_key, key_name in KEYS.items():
        cell_counts = Counter(mark.row.cell[cell_key] for mark in marks)
        if 1 < len(cell_counts) <= min(MOST_PANELS, len(marks) // min_cells) and max(cell_counts.values()) <= max_cells:
            variants = columns.name_row_variants([mark.row for mark in marks], cell_key)
            panel_titles = [columns.label_value(cell_key, mark.row.cell[cell_key]) for mark in marks]
            return {
                mark.label: PanelPlace(escape(title), escape(variant), key_name)
                for mark, title, variant in zip(marks, panel_titles, variants, strict=True)
            }
    return {}


def divide_lines(marks: Sequence[CellMark], line_names: Sequence[str], variants: Sequence[str]) -> dict[str, PanelPlace]:
    """Divide lines that connect cells into a panel per strategy. Returns {name of a line: its place}; empty if there are not
    more than MOST_SHOWN lines, or if they are of one strategy.

    marks: a cell of each line. line_names: the label of each line. variants: for each line a name, HTML-escaped, that tells it
    apart from the lines of its strategy.
    """
    strategies = [escape(mark.cell.cell.strategy) for mark in marks]
    if len(line_names) <= MOST_SHOWN or not 1 < len(set(strategies)) <= MOST_PANELS:
        return {}
    return {
        line_name: PanelPlace(strategy, variant, KEYS["strategy"])
        for line_name, strategy, variant in zip(line_names, strategies, variants, strict=True)
    }


def draw_cell_lines(
    figure_name: str,
    title: str,
    caption: str,
    group: WorkloadGroup,
    traces_by_label: Mapping[str, Sequence[dict[str, Any]]],
    x_axis: dict[str, Any],
    y_axis: dict[str, Any],
) -> Figure | None:
    """Draw the lines of cells, divided into panels if they are many; None if there are no lines.

    traces_by_label: label of a cell -> its traces, without its name and the look of its lines. x_axis, y_axis: the axes.
    """
    marks = [mark for mark in group.marks if traces_by_label.get(mark.label)]
    line_traces = [
        {"name": mark.label, "meta": mark.row.id, "line": mark.look.line, "visible": visible} | trace
        for mark, visible in order_by_visibility(marks)
        for trace in traces_by_label[mark.label]
    ]
    figure = Figure(figure_name, title, caption, LINES_PX, line_traces, make_layout(x_axis, y_axis, showlegend=True))
    return split_lines(figure, divide_cells(marks)) if line_traces else None


def split_lines(figure: Figure, place_by_line: Mapping[str, PanelPlace]) -> Figure:
    """Divide the lines of a figure into panels. A panel has its own lines in colour, and all other lines in grey behind them.

    place_by_line: the place of each line, by the `legendgroup` of its traces, or by their `name` if they have no group. Empty:
    the figure is returned as it is. Traces of no line, such as an ideal, are drawn in every panel.
    """
    if not place_by_line:
        return figure
    titles = list(dict.fromkeys(place.panel for place in place_by_line.values()))
    variants = list(dict.fromkeys(place.variant for place in place_by_line.values()))
    looks = {name: make_strategy_look(index % MOST_STRATEGIES, index // MOST_STRATEGIES) for index, name in enumerate(variants)}
    y_axes = [figure.layout[name] for name in sorted(figure.layout) if name.startswith("yaxis")]
    grid = arrange_panels([PLOT_PX] * len(titles), COLUMNS, len(y_axes), head_px=HEAD_PX)
    traces: list[dict[str, Any]] = []
    legend_names: set[str] = set()
    for position in grid.positions:
        plot_traces = [trace for trace in figure.data if trace.get("yaxis", "y") == name_axis("y", position.plot_index + 1)]
        places = [place_by_line.get(trace.get("legendgroup", trace.get("name", ""))) for trace in plot_traces]
        pairs = list(zip(plot_traces, places, strict=True))
        panel_title = titles[position.panel_index]
        other_traces = [trace for trace, place in pairs if place is not None and place.panel != panel_title]
        drawn_traces = [_make_grey_trace(other_traces, len(place_by_line)), *(trace for trace, place in pairs if place is None)]
        panel_lines = [(trace, place) for trace, place in pairs if place is not None and place.panel == panel_title]
        panel_lines.sort(key=lambda pair: variants.index(pair[1].variant))  # so that the legend has the order of the summary
        drawn_traces += [_make_coloured_trace(trace, place, looks) for trace, place in panel_lines]
        for trace in drawn_traces:
            is_new = trace.get("showlegend", True) and trace.get("name", "") not in {"", *legend_names}
            legend_names |= {trace["name"]} if is_new else set()
            traces.append(trace | {"showlegend": is_new, **position.axes})
    y_title = ", below: ".join(y_axis["title"]["text"] for y_axis in y_axes)
    y_axes = [y_axis | {"nticks": 4} for y_axis in y_axes]
    layout = grid_layout(grid, titles, [thin_ticks(figure.layout["xaxis"], MOST_TICKS)], y_axes, y_title, y_per_panel=False)
    layout["margin"] |= {"l": 48}
    height_px = MARGINS_PX + min(LEGEND_LINE_PX * -(-len(legend_names) // COLUMNS), LEGEND_HEIGHT_PX) + grid.height_px
    key_name = next(iter(place_by_line.values())).key_name
    panel_note = f" A panel per {key_name}, all with the same axes; grey: the lines of the other panels."
    return Figure(figure.name, figure.title, figure.caption + panel_note, height_px, traces, layout)


def _make_coloured_trace(trace: dict[str, Any], place: PanelPlace, look_by_variant: Mapping[str, Look]) -> dict[str, Any]:
    """A trace in the look of its variant. Its label is shown where the reader points at a line."""
    coloured_trace = trace | {"name": place.variant, "legendgroup": place.variant, "visible": True}
    if "hovertemplate" in trace:
        hover_start = trace["hovertemplate"].partition("<extra>")[0]
        coloured_trace |= {"text": trace["name"], "hovertemplate": f"{hover_start}<extra>%{{text}}</extra>"}
    if len(look_by_variant) > 1:  # with one variant, each strategy keeps its own look
        variant_look = look_by_variant[place.variant]
        coloured_trace |= {"line": trace.get("line", {}) | variant_look.line}
        if "marker" in trace:
            coloured_trace["marker"] = trace["marker"] | variant_look.marks(min(trace["marker"]["size"], MARK_PX))
        if "error_y" in trace:
            coloured_trace["error_y"] = trace["error_y"] | {"color": variant_look.colour}
    return coloured_trace


def _make_grey_trace(other_traces: Sequence[dict[str, Any]], line_count: int) -> dict[str, Any]:
    """One trace that draws the lines of all `other_traces` in grey. line_count: number of lines of the figure."""
    x_values: list[Any] = []
    y_values: list[float | None] = []
    for trace in other_traces:
        if "lines" in trace["mode"]:
            thinned_x, thinned_y = thin_points(trace["x"], trace["y"], max(GREY_POINTS // line_count, 8))
            x_values += [*thinned_x, None]
            y_values += [*thinned_y, None]
    line_style = {"name": "other panels", "legendgroup": "other panels", "line": GREY_LINE, "opacity": GREY_OPACITY}
    return make_points("lines", x_values, y_values, **line_style, connectgaps=False, hoverinfo="skip")
