"""Turns a crowded figure into small multiples: a panel per strategy, with the same axes in all panels.

A figure is crowded if it has more lines than MOST_SHOWN or more rows than MOST_ROWS. If a panel per strategy would be crowded
too, there is a panel per number of ranks, or per batch size. If no key gives readable panels, the figure stays one plot.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from collect.drawing.panel_grid import HEAD_PX, MARGINS_PX, grid, numbered, shape
from collect.figure import LEGEND_HEIGHT_PX, MOST_SHOWN, MUTED, CellMark, Figure, thin, with_few_ticks
from collect.findings import columns
from collect.strategy_style import MOST_STRATEGIES, Look, look

KEYS = {"strategy": "strategy", "gpus": "number of ranks", "global_batch_size": "batch size"}  # a panel for each value of one
MOST_PANELS = 24
COLUMNS = 2  # two panels beside each other are readable at 390 px, and at 1280 px, where two figures share a row
PLOT_PX, MARK_PX, LEGEND_LINE_PX = 112, 6, 22
MOST_TICKS = 4  # about the most ticks of the x axis of a panel that lists its ticks
GREY_POINTS = 2000  # about the most points of all grey lines of a panel together
GREY = {"color": MUTED, "width": 1}
GREY_OPACITY = 0.3


class Series(NamedTuple):
    """Where a line or a row of a crowded figure is drawn."""

    panel: str  # the title of its panel, HTML-escaped
    variant: str  # its name inside the panel, HTML-escaped; equal variants look the same in all panels
    by: str  # the key that gives the panels, in words


def of_cells(marks: Sequence[CellMark], most: int = MOST_SHOWN, fewest: int = 1) -> dict[str, Series]:
    """Divide cells into panels. Returns {label of a cell: its place}; empty if `marks` are not crowded or if no key divides
    them into readable panels.

    most: the most cells of a panel that is readable. fewest: the fewest cells that panels must have on average.
    """
    if len(marks) <= most:
        return {}
    for key, by in KEYS.items():
        sizes = Counter(mark.row.cell[key] for mark in marks)
        if 1 < len(sizes) <= min(MOST_PANELS, len(marks) // fewest) and max(sizes.values()) <= most:
            variants = columns.variants([mark.row for mark in marks], key)
            titles = [columns.named(key, mark.row.cell[key]) for mark in marks]
            return {
                mark.label: Series(html.escape(title, quote=False), html.escape(variant, quote=False), by)
                for mark, title, variant in zip(marks, titles, variants, strict=True)
            }
    return {}


def of_lines(marks: Sequence[CellMark], names: Sequence[str], variants: Sequence[str]) -> dict[str, Series]:
    """Divide lines that connect cells into a panel per strategy. Returns {name of a line: its place}; empty if there are not
    more than MOST_SHOWN lines, or if they are of one strategy.

    marks: a cell of each line. names, variants: of each line (`series.names`, `series.variants`).
    """
    strategies = [html.escape(mark.cell.cell.strategy, quote=False) for mark in marks]
    if len(names) <= MOST_SHOWN or not 1 < len(set(strategies)) <= MOST_PANELS:
        return {}
    return {
        name: Series(strategy, variant, KEYS["strategy"])
        for name, strategy, variant in zip(names, strategies, variants, strict=True)
    }


def lines(found: Figure, series: Mapping[str, Series]) -> Figure:
    """Divide the lines of a figure into panels. A panel has its own lines in colour, and all other lines in grey behind them.

    series: the place of each line, by the `legendgroup` of its traces, or by their `name` if they have no group. Empty: the
    figure is returned as it is. Traces of no line, such as an ideal, are drawn in every panel.
    """
    if not series:
        return found
    titles = list(dict.fromkeys(one.panel for one in series.values()))
    variants = list(dict.fromkeys(one.variant for one in series.values()))
    looks = {name: look(place % MOST_STRATEGIES, place // MOST_STRATEGIES) for place, name in enumerate(variants)}
    y_axes = [found.layout[name] for name in sorted(found.layout) if name.startswith("yaxis")]
    panels = grid([PLOT_PX] * len(titles), COLUMNS, len(y_axes), head_px=HEAD_PX)
    data: list[dict[str, Any]] = []
    named: set[str] = set()
    for place in panels.places:
        traces = [trace for trace in found.data if trace.get("yaxis", "y") == numbered("y", place.plot + 1)]
        places = [series.get(trace.get("legendgroup", trace.get("name", ""))) for trace in traces]
        pairs = list(zip(traces, places, strict=True))
        others = [trace for trace, one in pairs if one is not None and one.panel != titles[place.panel]]
        drawn = [_grey(others, len(series)), *(trace for trace, one in pairs if one is None)]
        own = [(trace, one) for trace, one in pairs if one is not None and one.panel == titles[place.panel]]
        own.sort(key=lambda pair: variants.index(pair[1].variant))  # so that the legend has the order of the summary
        drawn += [_coloured(trace, one, looks) for trace, one in own]
        for trace in drawn:
            is_new = trace.get("showlegend", True) and trace.get("name", "") not in {"", *named}
            named |= {trace["name"]} if is_new else set()
            data.append(trace | {"showlegend": is_new, **place.axes})
    y_title = ", below: ".join(one["title"]["text"] for one in y_axes)
    y_axes = [one | {"nticks": 4} for one in y_axes]
    made = shape(panels, titles, [with_few_ticks(found.layout["xaxis"], MOST_TICKS)], y_axes, y_title, own_y=False)
    made["margin"] |= {"l": 48}
    height_px = MARGINS_PX + min(LEGEND_LINE_PX * -(-len(named) // COLUMNS), LEGEND_HEIGHT_PX) + panels.height_px
    by = next(iter(series.values())).by
    told = f" A panel per {by}, all with the same axes; grey: the lines of the other panels."
    return Figure(found.name, found.title, found.caption + told, height_px, data, made)


def _coloured(trace: dict[str, Any], place: Series, looks: Mapping[str, Look]) -> dict[str, Any]:
    """A trace in the look of its variant. Its label is shown where the reader points at a line."""
    made = trace | {"name": place.variant, "legendgroup": place.variant, "visible": True}
    if "hovertemplate" in trace:
        template = trace["hovertemplate"].partition("<extra>")[0]
        made |= {"text": trace["name"], "hovertemplate": f"{template}<extra>%{{text}}</extra>"}
    if len(looks) > 1:  # with one variant, each strategy keeps its own look
        own = looks[place.variant]
        made |= {"line": trace.get("line", {}) | own.line}
        if "marker" in trace:
            made["marker"] = trace["marker"] | own.marks(min(trace["marker"]["size"], MARK_PX))
        if "error_y" in trace:
            made["error_y"] = trace["error_y"] | {"color": own.colour}
    return made


def _grey(others: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    """One trace that draws the lines of all `others` in grey. count: number of lines of the figure."""
    x: list[Any] = []
    y: list[float | None] = []
    for trace in others:
        if "lines" in trace["mode"]:
            some_x, some_y = thin(trace["x"], trace["y"], max(GREY_POINTS // count, 8))
            x += [*some_x, None]
            y += [*some_y, None]
    shared = {"name": "other panels", "legendgroup": "other panels", "line": GREY, "opacity": GREY_OPACITY}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, **shared, "connectgaps": False, "hoverinfo": "skip"}
