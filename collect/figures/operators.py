"""Draws rows of names with one bar per cell: the operators or kernels that differ most from the baseline, and the slowest
modules of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from collect.drawing.axes import make_axis
from collect.drawing.stacked_bars import make_labelled_rows_layout
from collect.drawing.traces import make_horizontal_bars
from collect.figure import MUTED, CellMark, Figure, WorkloadGroup, describe_rest, escape
from collect.findings.trace_details import LayerOfStep, list_cell_layers
from collect.traces import gloo, per_step
from collect.traces.breakdown import Breakdown, EventTally
from collect.traces.per_step import OperatorUse
from shardlab.terminal import notation

MOST_NAMES, MOST_LAYERS = 10, 16  # the most operators or kernels, and the most modules
MOST_CELLS = 6  # the most cells that are drawn, because each name has one bar per cell
NAME_PX, BAR_PX, GAP_PX, MARGIN_PX, LEGEND_PX = 20, 13, 8, 70, 16
# The most characters of a shown name. If its arguments are shown, the part before them has at most HEAD_LENGTH characters.
NAME_LENGTH, NAME_START_LENGTH = 44, 20
_NAMESPACES = re.compile(r"^void |\(anonymous namespace\)::|at::native::")
_ARGUMENTS = re.compile(r"(?<=\w)[<(]")
MIN_SHARE = 0.01  # share of the longest bar: a name whose bars are all shorter is left out, and a shorter bar gets no number
DIFFERENCE_FREE_SHARE, LAYER_FREE_SHARE = (
    0.22,
    0.15,
)  # shares of the x axis that are left free on a side for the numbers beside the bars
BACKWARD_OPACITY = 0.5


def _draw_name_rows(
    name: str, title: str, caption: str, names: Sequence[str], bars_by_cell: Sequence[list[dict[str, Any]]], x: dict[str, Any]
) -> Figure:
    """A figure with a row per name. In each row, the name is at the top, and the bars of the cells are below it.

    bars_by_cell: the traces of each cell, without the place of the bars in their rows.
    """
    row_px = NAME_PX + BAR_PX * len(bars_by_cell) + GAP_PX
    traces = [
        {"offset": (NAME_PX + BAR_PX * index) / row_px, "width": (BAR_PX - 1) / row_px, "cliponaxis": False}
        | {"hovertemplate": "%{customdata}<extra></extra>"}
        | bar_trace
        for index, cell_bars in enumerate(bars_by_cell)
        for bar_trace in cell_bars
    ]
    height_px = MARGIN_PX + LEGEND_PX * len(bars_by_cell) + row_px * len(names)
    layout = make_labelled_rows_layout([escape(label) for label in names], NAME_PX, row_px) | {"xaxis": x, "barmode": "overlay"}
    return Figure(name, title, caption, height_px, traces, layout)


def _make_texts_beside_bars(bar_texts: list[str]) -> dict[str, Any]:
    return {"text": bar_texts, "textposition": "outside", "textfont": {"size": 10, "color": MUTED}}


class BaselinePair(NamedTuple):
    """A cell and its baseline, each with the calls and times of its kernels or operators in a profiled step."""

    cell_mark: CellMark
    """The cell."""
    cell_uses: dict[str, OperatorUse]
    """Name of a kernel or operator -> its calls and time in the cell."""
    baseline_mark: CellMark
    """The baseline."""
    baseline_uses: dict[str, OperatorUse]
    """Name of a kernel or operator -> its calls and time in the baseline."""


def draw_differences(group: WorkloadGroup) -> Figure | None:
    """Draw the operators or kernels whose time differs most between a cell and its baseline: one bar for each of the first
    MOST_CELLS cells that were profiled in the same way as their baselines."""
    pairs = [
        (mark, baseline)
        for mark, baseline in group.pairs_with_baselines
        if _find_use_kind(mark) and _find_use_kind(mark) == _find_use_kind(baseline)
    ]
    drawn_pairs = [BaselinePair(mark, get_uses(mark), baseline, get_uses(baseline)) for mark, baseline in pairs[:MOST_CELLS]]
    names = find_most_different_names(drawn_pairs)
    if not names:
        return None
    bars = [_make_difference_bars(names, pair) for pair in drawn_pairs]
    differences_ms = [difference_ms for cell_bars in bars for difference_ms in cell_bars["x"]]
    lowest_ms, highest_ms = min(0, *differences_ms), max(0, *differences_ms)
    free_ms = DIFFERENCE_FREE_SHARE * (highest_ms - lowest_ms)
    x_range = [lowest_ms - free_ms if lowest_ms else -free_ms / 4, highest_ms + free_ms]
    x_axis = make_axis("additional ms per step", range=x_range, zeroline=True, nticks=5)
    caption = (
        f"Time per step minus that of the cell's baseline ({group.baseline}); bars left of 0: less time than the baseline. "
        f"Mean over profiled ranks and repeats. At most {MOST_NAMES} names, those that differ most. The time of an operator "
        "includes the operators that it calls; autograd's wrappers around operators are not shown."
    ) + describe_rest(len(pairs) - len(drawn_pairs))
    title, x_axis = "Operators against the baseline", x_axis | {"zerolinecolor": MUTED}
    return _draw_name_rows("operator_differences", title, caption, shorten_names(names), [[entry] for entry in bars], x_axis)


def find_most_different_names(pairs: list[BaselinePair]) -> list[str]:
    """The kernels or operators whose time differs most in any pair, largest difference first; small differences are left
    out."""
    most_ms_by_name: dict[str, float] = {}
    for pair in pairs:
        for name in pair.cell_uses.keys() | pair.baseline_uses.keys():
            most_ms_by_name[name] = max(most_ms_by_name.get(name, 0), abs(_compute_difference_ms(name, pair)))
    threshold_ms = MIN_SHARE * max(most_ms_by_name.values(), default=0)
    names = [name for name in most_ms_by_name if most_ms_by_name[name] > threshold_ms]
    return sorted(names, key=lambda name: (-most_ms_by_name[name], name))[:MOST_NAMES]


def get_uses(mark: CellMark) -> dict[str, OperatorUse]:
    """The calls and times of each kernel or operator in a step of a cell, as the mean over the cell's completed runs.

    The wrappers that autograd puts around operators are left out.
    """
    return per_step.compute_uses_per_step((run.traces.exact for run in mark.cell.completed_runs), _drop_wrappers)


def _drop_wrappers(breakdown: Breakdown) -> list[EventTally]:
    return [tally for tally in breakdown.kernels if not tally.name.startswith(gloo.AUTOGRAD_NODE)]


def _find_use_kind(mark: CellMark) -> str | None:
    """`kernels` or `operators`: which of the two the profiles of a cell name. Kernels cannot be compared with operators.

    None if the cell was not profiled, or if some of its runs name kernels and others name operators.
    """
    sources = {breakdown.source for run in mark.cell.completed_runs for breakdown in run.traces.exact if breakdown.steps}
    kinds = {"kernels" if source == "gpu" else "operators" for source in sources}
    return kinds.pop() if len(kinds) == 1 else None


def _compute_difference_ms(name: str, pair: BaselinePair) -> float:
    """The time of the kernel or operator `name` in the cell minus its time in the baseline, in ms per step.

    If a cell does not call it, its time is 0.
    """
    cell_ms = pair.cell_uses[name].total_ms if name in pair.cell_uses else 0
    return cell_ms - (pair.baseline_uses[name].total_ms if name in pair.baseline_uses else 0)


def _make_difference_bars(names: list[str], pair: BaselinePair) -> dict[str, Any]:
    differences_ms = [_compute_difference_ms(name, pair) for name in names]
    threshold_ms = MIN_SHARE * max(map(abs, differences_ms))
    texts = [
        f"{'+' if value > 0 else '−'}{notation.format_number(abs(value), 3)}" if abs(value) > threshold_ms else ""
        for value in differences_ms
    ]
    marks_with_uses = ((pair.cell_mark, pair.cell_uses), (pair.baseline_mark, pair.baseline_uses))
    hover_texts = ["<br>".join((escape(name), *(_describe_use(*side, name) for side in marks_with_uses))) for name in names]
    bars = make_horizontal_bars(differences_ms, list(range(len(names))), name=pair.cell_mark.label, meta=pair.cell_mark.row.id)
    return bars | {"customdata": hover_texts, "marker": {"color": pair.cell_mark.look.colour}} | _make_texts_beside_bars(texts)


def _describe_use(mark: CellMark, use_by_name: dict[str, OperatorUse], name: str) -> str:
    if name not in use_by_name:
        return f"{mark.label}: not called"
    use = use_by_name[name]
    calls_text = notation.format_number(use.calls, 3)
    return f"{mark.label}: {notation.format_number(use.total_ms)} ms in {calls_text} calls per step"


def shorten_names(names: list[str]) -> list[str]:
    """Shorten the names of kernels: remove namespaces, template arguments and parameters.

    If several kernels would then have the same name, the beginning of their arguments is kept.
    """
    full_names = [_NAMESPACES.sub("", name) for name in names]
    base_names = [_ARGUMENTS.split(name, maxsplit=1)[0] for name in full_names]
    return [
        _cut_middle(base_name, NAME_LENGTH)
        if base_names.count(base_name) == 1
        else f"{_cut_middle(base_name, NAME_START_LENGTH)}{name[len(base_name) :][: NAME_LENGTH - NAME_START_LENGTH - 1]}…"
        for name, base_name in zip(full_names, base_names, strict=True)
    ]


def _cut_middle(name: str, max_length: int) -> str:
    """Cut the middle out of a name that is longer than `max_length`: the names of kernels often differ only at the end."""
    return name if len(name) <= max_length else f"{name[: max_length - max_length // 3 - 1]}…{name[-(max_length // 3) :]}"


def draw_layers(group: WorkloadGroup) -> Figure | None:
    """Draw how long the slowest modules take in a profiled step, forward and backward: one row per module that calls no other
    module, with one bar for each of the first MOST_CELLS cells whose traces record the calls of modules.

    The rows are the modules that take the longest in any cell, in the order of their calls.
    """
    layers_of_marks = [(mark, layers) for mark in group.marks if (layers := list_leaf_layers(mark))]
    drawn_marks = layers_of_marks[:MOST_CELLS]
    if not drawn_marks:
        return None
    layer_names = find_longest_layers([layers for _, layers in drawn_marks])
    longest_ms = max(_sum_passes_ms(layers[name]) for _, layers in drawn_marks for name in layer_names if name in layers)
    x_axis = make_axis("ms per step", range=[0, longest_ms * (1 + LAYER_FREE_SHARE) or 1], nticks=5)
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Dark: forward; light: backward. On a GPU: kernels "
        "that compute and memory operations that the module launched; on a CPU: the time of the host. At most "
        f"{MOST_LAYERS} modules that call no other module, those that take the longest; all are in the table."
    ) + describe_rest(len(layers_of_marks) - len(drawn_marks))
    bars_of_cells = [_make_layer_bars(layer_names, mark, layers) for mark, layers in drawn_marks]
    return _draw_name_rows("layers", "Modules of the model", caption, layer_names, bars_of_cells, x_axis)


def list_leaf_layers(mark: CellMark) -> dict[str, LayerOfStep]:
    """The modules of a cell that call no other module: {name: module}, in the order of their first calls."""
    layers = list_cell_layers(mark.cell)
    parent_names = {layer.parent for layer in layers}
    return {layer.layer: layer for layer in layers if layer.layer not in parent_names}


def find_longest_layers(layers_by_cell: list[dict[str, LayerOfStep]]) -> list[str]:
    """The names of the MOST_LAYERS modules that take the longest in any cell, in the order of their first calls."""
    longest_ms_by_name: dict[str, float] = {}
    for layer_by_name in layers_by_cell:
        for name, layer in layer_by_name.items():
            longest_ms_by_name[name] = max(longest_ms_by_name.get(name, 0), _sum_passes_ms(layer))
    longest_names = set(sorted(longest_ms_by_name, key=lambda name: (-longest_ms_by_name[name], name))[:MOST_LAYERS])
    return [name for name in longest_ms_by_name if name in longest_names]


def _sum_passes_ms(layer: LayerOfStep) -> float:
    return layer.forward_ms + (layer.backward_ms or 0)


def _make_layer_bars(names: list[str], mark: CellMark, layers: dict[str, LayerOfStep]) -> list[dict[str, Any]]:
    """The bars of one cell: the bar of the forward pass, followed by the bar of the backward pass, for each module."""
    drawn_layers = [layers[name] for name in names if name in layers]
    y, forward_ms = [row for row, name in enumerate(names) if name in layers], [layer.forward_ms for layer in drawn_layers]
    hover_texts = [f"{escape(layer.layer)}, {mark.label}<br>{_describe_passes(layer)} per step" for layer in drawn_layers]
    bar_style = {"customdata": hover_texts, "legendgroup": mark.label, "meta": mark.row.id}
    marker_colour = {"color": mark.look.colour}
    forward_bars = make_horizontal_bars(forward_ms, y, name=mark.label, marker=marker_colour, **bar_style)
    backward_style = {"marker": marker_colour | {"opacity": BACKWARD_OPACITY}, "showlegend": False, "base": forward_ms}
    backward_style |= _make_texts_beside_bars([notation.format_number(_sum_passes_ms(layer), 3) for layer in drawn_layers])
    backward_ms = [layer.backward_ms or 0 for layer in drawn_layers]
    return [forward_bars, make_horizontal_bars(backward_ms, y, name=f"{mark.label}, backward", **bar_style, **backward_style)]


def _describe_passes(layer: LayerOfStep) -> str:
    backward = "backward unknown" if layer.backward_ms is None else f"backward {notation.format_number(layer.backward_ms)} ms"
    return f"forward {notation.format_number(layer.forward_ms)} ms, {backward}"
