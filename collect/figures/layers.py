"""Draws how long the slowest modules of the model take in a profiled step, forward and backward."""

from __future__ import annotations

import html
from typing import Any

from collect import notation
from collect.drawing.stacked_bars import labelled_rows_layout
from collect.figure import MUTED, CellMark, Figure, Group, axis
from collect.findings.trace_details import LayerOfStep, cell_layers

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
    mark_layers = [(mark, leaf_layers(mark)) for mark in group.marks]
    mark_layers = [(mark, layers) for mark, layers in mark_layers if layers]
    drawn = mark_layers[:MOST_CELLS]
    if not drawn:
        return None
    names = longest_layer_names([layers for _, layers in drawn])
    line_px = NAME_PX + BAR_PX * len(drawn) + GAP_PX
    data = [bars for index, (mark, layers) in enumerate(drawn) for bars in _bars(names, index, line_px, mark, layers)]
    left_out_note = f" {len(mark_layers) - len(drawn)} more cells are not drawn." if len(mark_layers) > len(drawn) else ""
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Dark: forward; light: backward. On a GPU: kernels that "
        "compute and memory operations that the module launched; on a CPU: the time of the host. At most "
        f"{MOST_NAMES} modules that call no other module, those that take the longest; all are in the table.{left_out_note}"
    )
    figure_layout = labelled_rows_layout([html.escape(name, quote=False) for name in names], NAME_PX, line_px)
    longest_ms = max(_total_ms(layers[name]) for _, layers in drawn for name in names if name in layers)
    figure_layout["xaxis"] = axis("ms per step", range=[0, longest_ms * (1 + ROOM) or 1], nticks=5)
    figure_layout["barmode"] = "overlay"
    height_px = MARGIN_PX + LEGEND_PX * len(drawn) + line_px * len(names)
    return Figure(NAME, "Modules of the model", caption, height_px, data, figure_layout)


def leaf_layers(mark: CellMark) -> dict[str, LayerOfStep]:
    """The modules of a cell that call no other module: {name: module}, in the order of their first calls."""
    layers = cell_layers(mark.cell)
    parents = {layer.parent for layer in layers}
    return {layer.layer: layer for layer in layers if layer.layer not in parents}


def longest_layer_names(cells: list[dict[str, LayerOfStep]]) -> list[str]:
    """The names of the MOST_NAMES modules that take the longest in any cell, in the order of their first calls."""
    times: dict[str, float] = {}
    for layers in cells:
        for name, layer in layers.items():
            times[name] = max(times.get(name, 0), _total_ms(layer))
    longest_names = set(sorted(times, key=lambda name: (-times[name], name))[:MOST_NAMES])
    return [name for name in times if name in longest_names]


def _total_ms(layer: LayerOfStep) -> float:
    return layer.forward_ms + (layer.backward_ms or 0)


def _bars(names: list[str], index: int, line_px: int, mark: CellMark, layers: dict[str, LayerOfStep]) -> list[dict[str, Any]]:
    """The bars of one cell: the bar of the forward pass, followed by the bar of the backward pass, for each module."""
    rows = [(row, layers[name]) for row, name in enumerate(names) if name in layers]
    common: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "y": [row for row, _ in rows],
        "offset": (NAME_PX + BAR_PX * index) / line_px,
        "width": (BAR_PX - 1) / line_px,
        "customdata": [_hover_text(mark, layer) for _, layer in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        "legendgroup": mark.label,
        "meta": mark.row.id,
    }
    colour = {"color": mark.look.colour}
    forward = common | {"name": mark.label, "x": [layer.forward_ms for _, layer in rows], "marker": colour}
    backward = common | {
        "name": f"{mark.label}, backward",
        "x": [layer.backward_ms or 0 for _, layer in rows],
        "base": [layer.forward_ms for _, layer in rows],
        "marker": colour | {"opacity": BACKWARD_OPACITY},
        "text": [notation.format_number(_total_ms(layer), 3) for _, layer in rows],
        "textposition": "outside",
        "textfont": {"size": 10, "color": MUTED},
        "cliponaxis": False,
        "showlegend": False,
    }
    return [forward, backward]


def _hover_text(mark: CellMark, layer: LayerOfStep) -> str:
    backward = "backward unknown" if layer.backward_ms is None else f"backward {notation.format_number(layer.backward_ms)} ms"
    name = html.escape(layer.layer, quote=False)
    return f"{name}, {mark.label}<br>forward {notation.format_number(layer.forward_ms)} ms, {backward} per step"
