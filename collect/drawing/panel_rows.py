"""Turns a figure with too many rows into small multiples: a panel per strategy, each with the rows of its cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from collect.drawing.panel_grid import MARGINS_PX, grid, numbered, shape
from collect.drawing.small_multiples import COLUMNS, LEGEND_LINE_PX, Series, of_cells
from collect.figure import LEGEND_HEIGHT_PX, MOST_ROWS, CellMark, Figure, axis

ROW_PX, BAR_WIDTH = 18, 0.7  # height of a row, and share of it that a bar takes
FEWEST = 2  # the fewest rows that panels have on average: panels of one row would only be a longer list
MOST_GAPS = 1.5  # panels have the same rows if this makes them at most so many times as many rows
SHORT = 6  # the most characters of a text at the end of a row that fits beside another panel on a phone
ROOM = {1: 0.3, COLUMNS: 0.4}  # space for the texts at the end of rows, as a share of the longest row: {columns: share}
SMALL_MARKS_PX = 12


def rows(found: Figure, marks: Sequence[CellMark]) -> Figure:
    """Divide the rows of a figure into panels. Returns `found` itself if it has at most MOST_ROWS rows, or if no key of the
    cells gives panels of several rows.

    marks: the cells of the rows, from top to bottom. The y values of a row's marks are the label of its cell, or numbers from
    n to n + 1 for row n, counted from 0.
    """
    series = of_cells(marks, MOST_ROWS, FEWEST)
    if not series:
        return found
    labels = [mark.label for mark in marks]
    titles = list(dict.fromkeys(one.panel for one in series.values()))
    sizes = Counter(one.panel for one in series.values())
    variants = list(dict.fromkeys(one.variant for one in series.values()))
    is_dense = len(variants) * len(titles) <= MOST_GAPS * len(labels)
    x_names = sorted(name for name in found.layout if name.startswith("xaxis"))
    is_short = max((len(text.strip()) for text in _ends(found)), default=0) <= SHORT
    columns = COLUMNS if is_dense and is_short and len(x_names) == 1 else 1
    heights_px = [ROW_PX * (len(variants) if is_dense else sizes[title]) for title in titles]
    panels = grid(heights_px, columns, len(x_names), is_beside=len(x_names) > 1)
    data: list[dict[str, Any]] = []
    for place in panels.places:
        for trace in found.data:
            if trace.get("xaxis", "x") != x_names[place.plot].replace("axis", ""):
                continue
            part = _part(trace, labels, series, titles[place.panel])
            if part is None and (place.panel or trace["y"] != [None]):
                continue
            shared = {"legendgroup": trace["name"]} if trace.get("name") and trace.get("showlegend", True) else {}
            shown = trace.get("showlegend", True) and place.panel == 0
            data.append((part or trace) | shared | {"showlegend": shown, **place.axes})
    y = axis("", type="category", categoryorder="array", showgrid=False)
    x_axes = [_with_room(found.layout[name], name.replace("axis", ""), found, columns) for name in x_names]
    made = shape(panels, titles, x_axes, [y], "", own_y=not is_dense)
    for place in panels.places:
        shown_rows = variants if is_dense else [one.variant for one in series.values() if one.panel == titles[place.panel]]
        own = {"categoryarray": shown_rows[::-1], "range": [-0.6, len(shown_rows) - 0.4], "automargin": place.is_left}
        made[numbered("yaxis", place.number)] |= own
    made |= {key: found.layout[key] for key in ("showlegend", "barmode", "uniformtext") if key in found.layout}
    made["margin"] |= {"l": 8}
    names = {trace["name"] for trace in data if trace.get("name") and trace["showlegend"]} if made["showlegend"] else set()
    height_px = MARGINS_PX + min(LEGEND_LINE_PX * -(-len(names) // COLUMNS), LEGEND_HEIGHT_PX) + panels.height_px
    told = f" A panel per {next(iter(series.values())).by}, all with the same axes."
    return Figure(found.name, found.title, found.caption + told, height_px, data, made)


def _part(trace: dict[str, Any], labels: Sequence[str], series: Mapping[str, Series], title: str) -> dict[str, Any] | None:
    """The part of a trace that lies in the rows of the panel `title`; None if none of it does."""
    at = [value if isinstance(value, str) else None if value is None else labels[int(value)] for value in trace["y"]]
    wanted = [place for place, label in enumerate(at) if label is not None and series[label].panel == title]
    if not wanted:
        return None
    found: dict[str, Any] = _picked(trace, wanted, len(at)) | {"y": [series[at[place] or ""].variant for place in wanted]}
    if trace["type"] == "bar":
        found["width"] = BAR_WIDTH
    elif trace.get("marker", {}).get("symbol") == "line-ns":
        found["marker"] = found["marker"] | {"size": SMALL_MARKS_PX}
    if "hovertemplate" in trace:  # where it names the row, it must name the cell
        found |= {"hovertext": [at[place] for place in wanted]}
        found["hovertemplate"] = trace["hovertemplate"].replace("<extra>%{y}</extra>", "<extra>%{hovertext}</extra>")
    return found


def _picked(value: Any, wanted: Sequence[int], count: int) -> Any:
    """The value of a trace, in which of each list with an entry for each of `count` marks only the wanted entries are left."""
    if isinstance(value, dict):
        return {key: _picked(item, wanted, count) for key, item in value.items()}
    return [value[place] for place in wanted] if isinstance(value, list) and len(value) == count else value


def _ends(found: Figure) -> list[str]:
    """The texts that are drawn beside the ends of rows."""
    return [text for trace in found.data if _has_ends(trace) for text in trace["text"]]


def _has_ends(trace: dict[str, Any]) -> bool:
    return trace.get("textposition") == "outside" or (trace.get("mode") == "text" and any(trace["x"]))


def _with_room(x: dict[str, Any], name: str, found: Figure, columns: int) -> dict[str, Any]:
    """The x axis `name` with space for the texts at the ends of rows, if there are texts and the axis has no range."""
    longest = max((max(trace["x"]) for trace in found.data if _has_ends(trace) and trace.get("xaxis", "x") == name), default=0)
    few = x | {"nticks": 4, "tickangle": 0}
    return few | {"range": [0, longest * (1 + ROOM[columns])]} if longest and "range" not in x else few
