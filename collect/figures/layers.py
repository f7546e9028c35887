"""Draws how long the slowest modules of the model take in a profiled step, forward and backward."""

from __future__ import annotations

import html
from typing import Any

from collect import notation
from collect.drawing.stacked_bars import lines
from collect.figure import MUTED, CellMark, Figure, Group, axis
from collect.findings.trace_details import LayerOfStep, layers_of

NAME = "layers"
MOST_NAMES = 16
MOST_CELLS = 6  # the most cells that are drawn, because each module has one bar per cell
NAME_PX, BAR_PX, GAP_PX, MARGIN_PX, LEGEND_PX = 20, 12, 8, 70, 16
BACKWARD_OPACITY = 0.5
ROOM = 0.15  # share of the x axis that is left free for the numbers beside the bars


def draw(group: Group) -> Figure | None:
    """Draw one row per module that calls no other module, with one bar for each cell whose traces record the calls of modules.

    The rows are the modules that take the longest in any cell, in the order of their calls. At most MOST_CELLS cells are drawn.
    """
    found = [(mark, leaves(mark)) for mark in group.marks]
    found = [(mark, layers) for mark, layers in found if layers]
    shown = found[:MOST_CELLS]
    if not shown:
        return None
    names = longest([layers for _, layers in shown])
    line_px = NAME_PX + BAR_PX * len(shown) + GAP_PX
    data = [bars for place, (mark, layers) in enumerate(shown) for bars in _bars(names, place, line_px, mark, layers)]
    left_out = f" {len(found) - len(shown)} more cells are not drawn." if len(found) > len(shown) else ""
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Dark: forward; light: backward. On a GPU: kernels that "
        "compute and memory operations that the module launched; on a CPU: the time of the host. At most "
        f"{MOST_NAMES} modules that call no other module, those that take the longest; all are in the table.{left_out}"
    )
    shape = lines([html.escape(name, quote=False) for name in names], NAME_PX, line_px)
    largest = max(_total(layers[name]) for _, layers in shown for name in names if name in layers)
    shape["xaxis"] = axis("ms per step", range=[0, largest * (1 + ROOM) or 1], nticks=5)
    shape["barmode"] = "overlay"
    height_px = MARGIN_PX + LEGEND_PX * len(shown) + line_px * len(names)
    return Figure(NAME, "Modules of the model", caption, height_px, data, shape)


def leaves(mark: CellMark) -> dict[str, LayerOfStep]:
    """The modules of a cell that call no other module: {name: module}, in the order of their first calls."""
    layers = layers_of(mark.cell)
    parents = {one.parent for one in layers}
    return {one.layer: one for one in layers if one.layer not in parents}


def longest(cells: list[dict[str, LayerOfStep]]) -> list[str]:
    """The names of the MOST_NAMES modules that take the longest in any cell, in the order of their first calls."""
    times: dict[str, float] = {}
    for layers in cells:
        for name, one in layers.items():
            times[name] = max(times.get(name, 0), _total(one))
    kept = set(sorted(times, key=lambda name: (-times[name], name))[:MOST_NAMES])
    return [name for name in times if name in kept]


def _total(one: LayerOfStep) -> float:
    return one.forward_ms + (one.backward_ms or 0)


def _bars(names: list[str], place: int, line_px: int, mark: CellMark, layers: dict[str, LayerOfStep]) -> list[dict[str, Any]]:
    """The bars of one cell: the bar of the forward pass, followed by the bar of the backward pass, for each module."""
    rows = [(row, layers[name]) for row, name in enumerate(names) if name in layers]
    common: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "y": [row for row, _ in rows],
        "offset": (NAME_PX + BAR_PX * place) / line_px,
        "width": (BAR_PX - 1) / line_px,
        "customdata": [_says(mark, one) for _, one in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        "legendgroup": mark.label,
        "meta": mark.row.id,
    }
    colour = {"color": mark.look.colour}
    forward = common | {"name": mark.label, "x": [one.forward_ms for _, one in rows], "marker": colour}
    backward = common | {
        "name": f"{mark.label}, backward",
        "x": [one.backward_ms or 0 for _, one in rows],
        "base": [one.forward_ms for _, one in rows],
        "marker": colour | {"opacity": BACKWARD_OPACITY},
        "text": [notation.number(_total(one), 3) for _, one in rows],
        "textposition": "outside",
        "textfont": {"size": 10, "color": MUTED},
        "cliponaxis": False,
        "showlegend": False,
    }
    return [forward, backward]


def _says(mark: CellMark, one: LayerOfStep) -> str:
    backward = "backward unknown" if one.backward_ms is None else f"backward {notation.number(one.backward_ms)} ms"
    name = html.escape(one.layer, quote=False)
    return f"{name}, {mark.label}<br>forward {notation.number(one.forward_ms)} ms, {backward} per step"
