"""Turns a figure with too many rows into small multiples: a panel per strategy, each with the rows of its cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from collect.drawing.axes import LEGEND_HEIGHT_PX, make_axis, name_axis
from collect.drawing.panel_grid import MARGINS_PX, arrange_panels, grid_layout
from collect.drawing.small_multiples import COLUMNS, LEGEND_LINE_PX, PanelPlace, divide_cells
from collect.figure import MOST_ROWS, CellMark, Figure

ROW_PX, BAR_WIDTH = 18, 0.7  # height of a row, and share of it that a bar takes
MIN_ROWS_PER_PANEL = 2  # the fewest rows that panels have on average: panels of one row would only be a longer list
MAX_ROW_RATIO = 1.5  # panels have the same rows if this makes them at most so many times as many rows
SHORT_TEXT_CHARS = 6  # the most characters of a text at the end of a row that fits beside another panel on a phone
TEXT_SHARES = {1: 0.3, COLUMNS: 0.4}  # space for the texts at the end of rows, as a share of the longest row: {columns: share}
SMALL_MARKS_PX = 12


def split_rows(figure: Figure, marks: Sequence[CellMark]) -> Figure:
    """Divide the rows of a figure into panels. Returns `figure` itself if it has at most MOST_ROWS rows, or if no key of the
    cells gives panels of several rows.

    marks: the cells of the rows, from top to bottom. The y values of a row's marks are the label of its cell, or numbers from
    n to n + 1 for row n, counted from 0.
    """
    place_by_cell = divide_cells(marks, MOST_ROWS, MIN_ROWS_PER_PANEL)
    if not place_by_cell:
        return figure
    cell_labels = [mark.label for mark in marks]
    panel_titles = list(dict.fromkeys(place.panel for place in place_by_cell.values()))
    panel_sizes = Counter(place.panel for place in place_by_cell.values())
    variants = list(dict.fromkeys(place.variant for place in place_by_cell.values()))
    has_shared_rows = len(variants) * len(panel_titles) <= MAX_ROW_RATIO * len(cell_labels)
    x_names = sorted(name for name in figure.layout if name.startswith("xaxis"))
    are_texts_short = max((len(text.strip()) for text in _list_end_texts(figure)), default=0) <= SHORT_TEXT_CHARS
    column_count = COLUMNS if has_shared_rows and are_texts_short and len(x_names) == 1 else 1
    heights_px = [ROW_PX * (len(variants) if has_shared_rows else panel_sizes[title]) for title in panel_titles]
    grid = arrange_panels(heights_px, column_count, len(x_names), side_by_side=len(x_names) > 1)
    traces: list[dict[str, Any]] = []
    for position in grid.positions:
        for trace in figure.data:
            if trace.get("xaxis", "x") != x_names[position.plot_index].replace("axis", ""):
                continue
            panel_trace = _cut_panel_trace(trace, cell_labels, place_by_cell, panel_titles[position.panel_index])
            if panel_trace is None and (position.panel_index or trace["y"] != [None]):
                continue
            legend_group = {"legendgroup": trace["name"]} if trace.get("name") and trace.get("showlegend", True) else {}
            in_legend = trace.get("showlegend", True) and position.panel_index == 0
            traces.append((panel_trace or trace) | legend_group | {"showlegend": in_legend, **position.axes})
    y_axis = make_axis("", type="category", categoryorder="array", showgrid=False)
    x_axes = [_add_text_room(figure.layout[name], name.replace("axis", ""), figure, column_count) for name in x_names]
    layout = grid_layout(grid, panel_titles, x_axes, [y_axis], "", y_per_panel=not has_shared_rows)
    for position in grid.positions:
        title = panel_titles[position.panel_index]
        row_names = variants if has_shared_rows else [place.variant for place in place_by_cell.values() if place.panel == title]
        y_settings = {"categoryarray": row_names[::-1], "range": [-0.6, len(row_names) - 0.4], "automargin": position.is_left}
        layout[name_axis("yaxis", position.axes_number)] |= y_settings
    layout |= {key: figure.layout[key] for key in ("showlegend", "barmode", "uniformtext") if key in figure.layout}
    layout["margin"] |= {"l": 8}
    names = {trace["name"] for trace in traces if trace.get("name") and trace["showlegend"]} if layout["showlegend"] else set()
    height_px = MARGINS_PX + min(LEGEND_LINE_PX * -(-len(names) // COLUMNS), LEGEND_HEIGHT_PX) + grid.height_px
    panel_note = f" A panel per {next(iter(place_by_cell.values())).key_name}, all with the same axes."
    return Figure(figure.name, figure.title, figure.caption + panel_note, height_px, traces, layout)


def _cut_panel_trace(
    trace: dict[str, Any], labels: Sequence[str], place_by_cell: Mapping[str, PanelPlace], heading: str
) -> dict[str, Any] | None:
    """The part of a trace that lies in the rows of the panel `heading`; None if none of it does."""
    row_labels = [value if isinstance(value, str) else None if value is None else labels[int(value)] for value in trace["y"]]
    indexes = [index for index, label in enumerate(row_labels) if label is not None and place_by_cell[label].panel == heading]
    if not indexes:
        return None
    panel_trace: dict[str, Any] = _pick_entries(trace, indexes, len(row_labels)) | {
        "y": [place_by_cell[row_labels[index] or ""].variant for index in indexes]
    }
    if trace["type"] == "bar":
        panel_trace["width"] = BAR_WIDTH
    elif trace.get("marker", {}).get("symbol") == "line-ns":
        panel_trace["marker"] = panel_trace["marker"] | {"size": SMALL_MARKS_PX}
    if "hovertemplate" in trace:  # where it names the row, it must name the cell
        panel_trace |= {"hovertext": [row_labels[index] for index in indexes]}
        panel_trace["hovertemplate"] = trace["hovertemplate"].replace("<extra>%{y}</extra>", "<extra>%{hovertext}</extra>")
    return panel_trace


def _pick_entries(setting: Any, indexes: Sequence[int], mark_count: int) -> Any:
    """The value of a trace, in which of each list with an entry for each of `mark_count` marks only the wanted entries are
    left."""
    if isinstance(setting, dict):
        return {key: _pick_entries(inner_setting, indexes, mark_count) for key, inner_setting in setting.items()}
    return [setting[index] for index in indexes] if isinstance(setting, list) and len(setting) == mark_count else setting


def _list_end_texts(figure: Figure) -> list[str]:
    """The texts that are drawn beside the ends of rows."""
    return [text for trace in figure.data if _has_end_texts(trace) for text in trace["text"]]


def _has_end_texts(trace: dict[str, Any]) -> bool:
    return trace.get("textposition") == "outside" or (trace.get("mode") == "text" and any(trace["x"]))


def _add_text_room(x: dict[str, Any], x_name: str, figure: Figure, columns: int) -> dict[str, Any]:
    """The x axis `x_name` with space for the texts at the ends of rows, if there are texts and the axis has no range."""
    longest = max(
        (max(trace["x"]) for trace in figure.data if _has_end_texts(trace) and trace.get("xaxis", "x") == x_name), default=0
    )
    sparse_axis = x | {"nticks": 4, "tickangle": 0}
    return sparse_axis | {"range": [0, longest * (1 + TEXT_SHARES[columns])]} if longest and "range" not in x else sparse_axis
