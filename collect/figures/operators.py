"""Draws rows of names with one bar per cell: the operators or kernels that differ most from the baseline, and the slowest
modules of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from collect.drawing.axes import make_axis
from collect.drawing.stacked_bars import labelled_rows_layout
from collect.drawing.traces import horizontal_bars
from collect.figure import MUTED, CellMark, Figure, WorkloadGroup, count_left_out, escape
from collect.findings.trace_details import LayerOfStep, list_cell_layers
from collect.traces import gloo, per_step
from collect.traces.breakdown import Breakdown, EventTally
from collect.traces.per_step import Use
from shardlab.terminal import notation

MOST_NAMES, MOST_LAYERS = 10, 16  # the most operators or kernels, and the most modules
MOST_CELLS = 6  # the most cells that are drawn, because each name has one bar per cell
NAME_PX, BAR_PX, GAP_PX, MARGIN_PX, LEGEND_PX = 20, 13, 8, 70, 16
# The most characters of a shown name. If its arguments are shown, the part before them has at most HEAD_LENGTH characters.
NAME_LENGTH, HEAD_LENGTH = 44, 20
_NAMESPACES = re.compile(r"^void |\(anonymous namespace\)::|at::native::")
_ARGUMENTS = re.compile(r"(?<=\w)[<(]")
MIN_SHARE = 0.01  # share of the longest bar: a name whose bars are all shorter is left out, and a shorter bar gets no number
DIFFERENCE_ROOM, LAYER_ROOM = 0.22, 0.15  # shares of the x axis that are left free on a side for the numbers beside the bars
BACKWARD_OPACITY = 0.5


def _draw_name_rows(
    name: str, title: str, caption: str, names: Sequence[str], bars_by_cell: Sequence[list[dict[str, Any]]], x: dict[str, Any]
) -> Figure:
    """A figure with a row per name. In each row, the name is at the top, and the bars of the cells are below it.

    bars_by_cell: the traces of each cell, without the place of the bars in their rows.
    """
    row_px = NAME_PX + BAR_PX * len(bars_by_cell) + GAP_PX
    data = [
        {"offset": (NAME_PX + BAR_PX * index) / row_px, "width": (BAR_PX - 1) / row_px, "cliponaxis": False}
        | {"hovertemplate": "%{customdata}<extra></extra>"}
        | bars
        for index, cell_bars in enumerate(bars_by_cell)
        for bars in cell_bars
    ]
    height_px = MARGIN_PX + LEGEND_PX * len(bars_by_cell) + row_px * len(names)
    layout = labelled_rows_layout([escape(label) for label in names], NAME_PX, row_px) | {"xaxis": x, "barmode": "overlay"}
    return Figure(name, title, caption, height_px, data, layout)


def _texts_beside(texts: list[str]) -> dict[str, Any]:
    return {"text": texts, "textposition": "outside", "textfont": {"size": 10, "color": MUTED}}


class BaselinePair(NamedTuple):
    """A cell and its baseline, each with the calls and times of its kernels or operators in a profiled step."""

    mark: CellMark
    """The cell."""
    cell_uses: dict[str, Use]
    """Name of a kernel or operator -> its calls and time in the cell."""
    baseline: CellMark
    """The baseline."""
    baseline_uses: dict[str, Use]
    """Name of a kernel or operator -> its calls and time in the baseline."""


def draw_differences(group: WorkloadGroup) -> Figure | None:
    """Draw the operators or kernels whose time differs most between a cell and its baseline: one bar for each of the first
    MOST_CELLS cells that were profiled in the same way as their baselines."""
    pairs = [
        (mark, baseline)
        for mark, baseline in group.pairs_with_baselines
        if _use_kind(mark) and _use_kind(mark) == _use_kind(baseline)
    ]
    drawn_pairs = [BaselinePair(mark, mean_uses(mark), baseline, mean_uses(baseline)) for mark, baseline in pairs[:MOST_CELLS]]
    names = most_different_names(drawn_pairs)
    if not names:
        return None
    bars = [_difference_bars(names, pair) for pair in drawn_pairs]
    values = [value for cell_bars in bars for value in cell_bars["x"]]
    lowest, highest = min(0, *values), max(0, *values)
    room = DIFFERENCE_ROOM * (highest - lowest)
    x_range = [lowest - room if lowest else -room / 4, highest + room]
    x_axis = make_axis("additional ms per step", range=x_range, zeroline=True, nticks=5)
    caption = (
        f"Time per step minus that of the cell's baseline ({group.baseline}); bars left of 0: less time than the baseline. "
        f"Mean over profiled ranks and repeats. At most {MOST_NAMES} names, those that differ most. The time of an operator "
        "includes the operators that it calls; autograd's wrappers around operators are not shown."
    ) + count_left_out(len(pairs) - len(drawn_pairs))
    title, x_axis = "Operators against the baseline", x_axis | {"zerolinecolor": MUTED}
    return _draw_name_rows("operator_differences", title, caption, shorten_names(names), [[entry] for entry in bars], x_axis)


def most_different_names(pairs: list[BaselinePair]) -> list[str]:
    """The kernels or operators whose time differs most in any pair, largest difference first; small differences are left
    out."""
    most_ms: dict[str, float] = {}
    for pair in pairs:
        for name in pair.cell_uses.keys() | pair.baseline_uses.keys():
            most_ms[name] = max(most_ms.get(name, 0), abs(_difference_ms(name, pair)))
    threshold_ms = MIN_SHARE * max(most_ms.values(), default=0)
    names = [name for name in most_ms if most_ms[name] > threshold_ms]
    return sorted(names, key=lambda name: (-most_ms[name], name))[:MOST_NAMES]


def mean_uses(mark: CellMark) -> dict[str, Use]:
    """The calls and times of each kernel or operator in a step of a cell, as the mean over the cell's completed runs.

    The wrappers that autograd puts around operators are left out.
    """
    return per_step.compute_uses_per_step((run.traces.exact for run in mark.cell.completed_runs), _drop_wrappers)


def _drop_wrappers(breakdown: Breakdown) -> list[EventTally]:
    return [tally for tally in breakdown.kernels if not tally.name.startswith(gloo.AUTOGRAD_NODE)]


def _use_kind(mark: CellMark) -> str | None:
    """`kernels` or `operators`: which of the two the profiles of a cell name. Kernels cannot be compared with operators.

    None if the cell was not profiled, or if some of its runs name kernels and others name operators.
    """
    sources = {breakdown.source for run in mark.cell.completed_runs for breakdown in run.traces.exact if breakdown.steps}
    kinds = {"kernels" if source == "gpu" else "operators" for source in sources}
    return kinds.pop() if len(kinds) == 1 else None


def _difference_ms(name: str, pair: BaselinePair) -> float:
    """The time of the kernel or operator `name` in the cell minus its time in the baseline, in ms per step.

    If a cell does not call it, its time is 0.
    """
    cell_ms = pair.cell_uses[name].ms if name in pair.cell_uses else 0
    return cell_ms - (pair.baseline_uses[name].ms if name in pair.baseline_uses else 0)


def _difference_bars(names: list[str], pair: BaselinePair) -> dict[str, Any]:
    differences_ms = [_difference_ms(name, pair) for name in names]
    threshold_ms = MIN_SHARE * max(map(abs, differences_ms))
    texts = [
        f"{'+' if value > 0 else '−'}{notation.format_number(abs(value), 3)}" if abs(value) > threshold_ms else ""
        for value in differences_ms
    ]
    sides = ((pair.mark, pair.cell_uses), (pair.baseline, pair.baseline_uses))
    hover_texts = ["<br>".join((escape(name), *(_use_text(*side, name) for side in sides))) for name in names]
    bars = horizontal_bars(differences_ms, list(range(len(names))), name=pair.mark.label, meta=pair.mark.row.id)
    return bars | {"customdata": hover_texts, "marker": {"color": pair.mark.look.colour}} | _texts_beside(texts)


def _use_text(mark: CellMark, uses: dict[str, Use], name: str) -> str:
    if name not in uses:
        return f"{mark.label}: not called"
    ms, calls = notation.format_number(uses[name].ms), notation.format_number(uses[name].calls, 3)
    return f"{mark.label}: {ms} ms in {calls} calls per step"


def shorten_names(names: list[str]) -> list[str]:
    """Shorten the names of kernels: remove namespaces, template arguments and parameters.

    If several kernels would then have the same name, the beginning of their arguments is kept.
    """
    full_names = [_NAMESPACES.sub("", name) for name in names]
    base_names = [_ARGUMENTS.split(name, maxsplit=1)[0] for name in full_names]
    return [
        _cut_middle(base, NAME_LENGTH)
        if base_names.count(base) == 1
        else f"{_cut_middle(base, HEAD_LENGTH)}{name[len(base) :][: NAME_LENGTH - HEAD_LENGTH - 1]}…"
        for name, base in zip(full_names, base_names, strict=True)
    ]


def _cut_middle(name: str, length: int) -> str:
    """Cut the middle out of a name that is longer than `length`: the names of kernels often differ only at the end."""
    return name if len(name) <= length else f"{name[: length - length // 3 - 1]}…{name[-(length // 3) :]}"


def draw_layers(group: WorkloadGroup) -> Figure | None:
    """Draw how long the slowest modules take in a profiled step, forward and backward: one row per module that calls no other
    module, with one bar for each of the first MOST_CELLS cells whose traces record the calls of modules.

    The rows are the modules that take the longest in any cell, in the order of their calls.
    """
    mark_layers = [(mark, layers) for mark in group.marks if (layers := leaf_layers(mark))]
    drawn_marks = mark_layers[:MOST_CELLS]
    if not drawn_marks:
        return None
    names = longest_layer_names([layers for _, layers in drawn_marks])
    longest_ms = max(_total_ms(layers[name]) for _, layers in drawn_marks for name in names if name in layers)
    x_axis = make_axis("ms per step", range=[0, longest_ms * (1 + LAYER_ROOM) or 1], nticks=5)
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Dark: forward; light: backward. On a GPU: kernels that "
        "compute and memory operations that the module launched; on a CPU: the time of the host. At most "
        f"{MOST_LAYERS} modules that call no other module, those that take the longest; all are in the table."
    ) + count_left_out(len(mark_layers) - len(drawn_marks))
    bars = [_layer_bars(names, mark, layers) for mark, layers in drawn_marks]
    return _draw_name_rows("layers", "Modules of the model", caption, names, bars, x_axis)


def leaf_layers(mark: CellMark) -> dict[str, LayerOfStep]:
    """The modules of a cell that call no other module: {name: module}, in the order of their first calls."""
    layers = list_cell_layers(mark.cell)
    parents = {layer.parent for layer in layers}
    return {layer.layer: layer for layer in layers if layer.layer not in parents}


def longest_layer_names(layers_by_cell: list[dict[str, LayerOfStep]]) -> list[str]:
    """The names of the MOST_LAYERS modules that take the longest in any cell, in the order of their first calls."""
    longest_ms: dict[str, float] = {}
    for layers in layers_by_cell:
        for name, layer in layers.items():
            longest_ms[name] = max(longest_ms.get(name, 0), _total_ms(layer))
    longest_names = set(sorted(longest_ms, key=lambda name: (-longest_ms[name], name))[:MOST_LAYERS])
    return [name for name in longest_ms if name in longest_names]


def _total_ms(layer: LayerOfStep) -> float:
    return layer.forward_ms + (layer.backward_ms or 0)


def _layer_bars(names: list[str], mark: CellMark, layers: dict[str, LayerOfStep]) -> list[dict[str, Any]]:
    """The bars of one cell: the bar of the forward pass, followed by the bar of the backward pass, for each module."""
    drawn_layers = [layers[name] for name in names if name in layers]
    y, forward_ms = [row for row, name in enumerate(names) if name in layers], [layer.forward_ms for layer in drawn_layers]
    texts = [f"{escape(layer.layer)}, {mark.label}<br>{_passes_text(layer)} per step" for layer in drawn_layers]
    style = {"customdata": texts, "legendgroup": mark.label, "meta": mark.row.id}
    colour = {"color": mark.look.colour}
    forward = horizontal_bars(forward_ms, y, name=mark.label, marker=colour, **style)
    backward_style = {"marker": colour | {"opacity": BACKWARD_OPACITY}, "showlegend": False, "base": forward_ms}
    backward_style |= _texts_beside([notation.format_number(_total_ms(layer), 3) for layer in drawn_layers])
    backward_ms = [layer.backward_ms or 0 for layer in drawn_layers]
    return [forward, horizontal_bars(backward_ms, y, name=f"{mark.label}, backward", **style, **backward_style)]


def _passes_text(layer: LayerOfStep) -> str:
    backward = "backward unknown" if layer.backward_ms is None else f"backward {notation.format_number(layer.backward_ms)} ms"
    return f"forward {notation.format_number(layer.forward_ms)} ms, {backward}"
