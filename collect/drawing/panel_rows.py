"""Turns a figure with too many rows into small multiples: a panel per strategy, each with the rows of its cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from collect.drawing.axes import LEGEND_HEIGHT_PX, axis_name, make_axis
from collect.drawing.panel_grid import MARGINS_PX, arrange_panels, grid_layout
from collect.drawing.small_multiples import COLUMNS, LEGEND_LINE_PX, PanelPlace, divide_cells
from collect.figure import MOST_ROWS, CellMark, Figure

ROW_PX, BAR_WIDTH = 18, 0.7  # height of a row, and share of it that a bar takes
MIN_ROWS_PER_PANEL = 2  # the fewest rows that panels have on average: panels of one row would only be a longer list
MOST_GAPS = 1.5  # panels have the same rows if this makes them at most so many times as many rows
SHORT_TEXT_CHARS = 6  # the most characters of a text at the end of a row that fits beside another panel on a phone
TEXT_ROOM = {1: 0.3, COLUMNS: 0.4}  # space for the texts at the end of rows, as a share of the longest row: {columns: share}
SMALL_MARKS_PX = 12


def split_rows(figure: Figure, marks: Sequence[CellMark]) -> Figure:
    """Divide the rows of a figure into panels. Returns `figure` itself if it has at most MOST_ROWS rows, or if no key of the
    cells gives panels of several rows.

    marks: the cells of the rows, from top to bottom. The y values of a row's marks are the label of its cell, or numbers from
    n to n + 1 for row n, counted from 0.
    """
    place_of_cell = divide_cells(marks, MOST_ROWS, MIN_ROWS_PER_PANEL)
    if not place_of_cell:
        return figure
    labels = [mark.label for mark in marks]
    titles = list(dict.fromkeys(place.panel for place in place_of_cell.values()))
    panel_sizes = Counter(place.panel for place in place_of_cell.values())
    variants = list(dict.fromkeys(place.variant for place in place_of_cell.values()))
    is_dense = len(variants) * len(titles) <= MOST_GAPS * len(labels)
    x_names = sorted(name for name in figure.layout if name.startswith("xaxis"))
    is_short = max((len(text.strip()) for text in _end_texts(figure)), default=0) <= SHORT_TEXT_CHARS
    columns = COLUMNS if is_dense and is_short and len(x_names) == 1 else 1
    heights_px = [ROW_PX * (len(variants) if is_dense else panel_sizes[title]) for title in titles]
    grid = arrange_panels(heights_px, columns, len(x_names), side_by_side=len(x_names) > 1)
    data: list[dict[str, Any]] = []
    for position in grid.positions:
        for trace in figure.data:
            if trace.get("xaxis", "x") != x_names[position.plot_index].replace("axis", ""):
                continue
            panel_trace = _cut_panel_trace(trace, labels, place_of_cell, titles[position.panel_index])
            if panel_trace is None and (position.panel_index or trace["y"] != [None]):
                continue
            legend_group = {"legendgroup": trace["name"]} if trace.get("name") and trace.get("showlegend", True) else {}
            in_legend = trace.get("showlegend", True) and position.panel_index == 0
            data.append((panel_trace or trace) | legend_group | {"showlegend": in_legend, **position.axes})
    y = make_axis("", type="category", categoryorder="array", showgrid=False)
    x_axes = [_add_room(figure.layout[name], name.replace("axis", ""), figure, columns) for name in x_names]
    layout = grid_layout(grid, titles, x_axes, [y], "", y_per_panel=not is_dense)
    for position in grid.positions:
        title = titles[position.panel_index]
        row_names = variants if is_dense else [place.variant for place in place_of_cell.values() if place.panel == title]
        y_settings = {"categoryarray": row_names[::-1], "range": [-0.6, len(row_names) - 0.4], "automargin": position.is_left}
        layout[axis_name("yaxis", position.number)] |= y_settings
    layout |= {key: figure.layout[key] for key in ("showlegend", "barmode", "uniformtext") if key in figure.layout}
    layout["margin"] |= {"l": 8}
    names = {trace["name"] for trace in data if trace.get("name") and trace["showlegend"]} if layout["showlegend"] else set()
    height_px = MARGINS_PX + min(LEGEND_LINE_PX * -(-len(names) // COLUMNS), LEGEND_HEIGHT_PX) + grid.height_px
    panel_note = f" A panel per {next(iter(place_of_cell.values())).key_name}, all with the same axes."
    return Figure(figure.name, figure.title, figure.caption + panel_note, height_px, data, layout)


def _cut_panel_trace(
    trace: dict[str, Any], labels: Sequence[str], place_of_cell: Mapping[str, PanelPlace], title: str
) -> dict[str, Any] | None:
    """The part of a trace that lies in the rows of the panel `title`; None if none of it does."""
    row_labels = [value if isinstance(value, str) else None if value is None else labels[int(value)] for value in trace["y"]]
    indexes = [index for index, label in enumerate(row_labels) if label is not None and place_of_cell[label].panel == title]
    if not indexes:
        return None
    panel_trace: dict[str, Any] = _pick_entries(trace, indexes, len(row_labels)) | {
        "y": [place_of_cell[row_labels[index] or ""].variant for index in indexes]
    }
    if trace["type"] == "bar":
        panel_trace["width"] = BAR_WIDTH
    elif trace.get("marker", {}).get("symbol") == "line-ns":
        panel_trace["marker"] = panel_trace["marker"] | {"size": SMALL_MARKS_PX}
    if "hovertemplate" in trace:  # where it names the row, it must name the cell
        panel_trace |= {"hovertext": [row_labels[index] for index in indexes]}
        panel_trace["hovertemplate"] = trace["hovertemplate"].replace("<extra>%{y}</extra>", "<extra>%{hovertext}</extra>")
    return panel_trace


def _pick_entries(value: Any, indexes: Sequence[int], count: int) -> Any:
    """The value of a trace, in which of each list with an entry for each of `count` marks only the wanted entries are left."""
    if isinstance(value, dict):
        return {key: _pick_entries(item, indexes, count) for key, item in value.items()}
    return [value[index] for index in indexes] if isinstance(value, list) and len(value) == count else value


def _end_texts(figure: Figure) -> list[str]:
    """The texts that are drawn beside the ends of rows."""
    return [text for trace in figure.data if _has_end_texts(trace) for text in trace["text"]]


def _has_end_texts(trace: dict[str, Any]) -> bool:
    return trace.get("textposition") == "outside" or (trace.get("mode") == "text" and any(trace["x"]))


def _add_room(x: dict[str, Any], name: str, figure: Figure, columns: int) -> dict[str, Any]:
    """The x axis `name` with space for the texts at the ends of rows, if there are texts and the axis has no range."""
    longest = max(
        (max(trace["x"]) for trace in figure.data if _has_end_texts(trace) and trace.get("xaxis", "x") == name), default=0
    )
    sparse_axis = x | {"nticks": 4, "tickangle": 0}
    return sparse_axis | {"range": [0, longest * (1 + TEXT_ROOM[columns])]} if longest and "range" not in x else sparse_axis
