"""Draws the rates that parts of a step reach, beside the rate of the data sheet: bus bandwidths and FLOP/s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collect.drawing.axes import rows_height_px, rows_layout
from collect.drawing.panel_rows import split_rows
from collect.drawing.stacked_bars import select_cells
from collect.drawing.traces import scatter_trace
from collect.figure import INK, SERIES, CellMark, Figure, WorkloadGroup, escape
from collect.figures.step_parts import COLLECTIVES
from collect.findings.trace_answers import GroupTraffic, list_cell_traffic, list_profiled_runs
from collect.findings.trace_details import ProductOfStep, list_cell_products
from shardlab.hardware.gpu_models import find_peak_flops
from shardlab.terminal import notation

LEGEND_PX, STROKE_PX, MARKER_PX = 30, 18, 11
SMALLEST_PX, LARGEST_PX = 5, 18  # sizes of the marks of matrix products
MOST_PRODUCTS = 12  # the most marks of a cell, for the products that take the longest
TERA = 1e12
OPERATORS = {"aten::mm": SERIES[1], "aten::addmm": SERIES[2], "aten::bmm": SERIES[3], "aten::baddbmm": SERIES[4]} | {
    "aten::linear": SERIES[5], "aten::_scaled_mm": SERIES[6],
}  # fmt: skip  # operator of a matrix product -> its colour


class Rate(NamedTuple):
    """A rate that a part of a step of a cell reaches."""

    mark: CellMark
    kind: str
    """The name of the part in the legend, such as `all_reduce`."""
    value: float
    """The rate in the unit of the axis."""
    hover_text: str
    """What the reader sees besides the rate when pointing at the mark."""
    size_px: float = MARKER_PX
    """The size of the mark."""


def draw_bandwidth(group: WorkloadGroup) -> Figure | None:
    """Draw the bus bandwidth of each collective: one row per cell, with one mark for each collective of each process group
    whose bandwidth is known, compared with the bandwidth of the link between the GPUs."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(measured_collectives(mark)))
    uses = [(mark, use) for mark in drawn_group.marks for use in measured_collectives(mark)]
    rates = [Rate(mark, use.collective, use.bus_gb_per_s or 0, escape(_traffic_text(use))) for mark, use in uses]
    links = {(mark.label, use.link_gb_per_s, use.link or "") for mark, use in uses if use.link_gb_per_s is not None}
    caption = (
        "A mark per collective and process group, over profiled ranks and repeats. Bus bandwidth as nccl-tests defines it: "
        "size of the message over the time of the transfer, times a factor of the collective, so that it compares with the "
        "bandwidth of a link. Without traces of all ranks the time includes waiting for slow ranks. The stroke: the link "
        f"between the GPUs of a host in one direction, by the data sheet.{left_out_note}"
    )
    layout = rows_layout(drawn_group, "bus bandwidth in GB/s")
    figure = Figure("bandwidth", "Bandwidth of collectives", caption, rows_height_px(drawn_group) + LEGEND_PX, [], layout)
    hover = "%{customdata}: %{x:,.4~g} GB/s in one direction<extra>%{y}</extra>"
    return _add_rates(figure, drawn_group, "GB/s", COLLECTIVES, rates, "link", sorted(links, key=str), hover)


def measured_collectives(mark: CellMark) -> list[GroupTraffic]:
    """The collectives of a cell whose bus bandwidth is known and whose kind has its own colour in figures."""
    return [use for use in list_cell_traffic(mark.cell) if use.bus_gb_per_s is not None and use.collective in COLLECTIVES]


def _traffic_text(use: GroupTraffic) -> str:
    size = "" if use.message_bytes is None else f", {notation.format_number(use.message_bytes / notation.MIB, 3)} MiB each"
    return f"process group {use.group}: {notation.format_number(use.calls, 3)} calls per step{size}"


def draw_matrix_products(group: WorkloadGroup) -> Figure | None:
    """Draw the FLOP/s of matrix products: one row per cell, with one mark for each operator and size, compared with the peak of
    the GPU. The larger a mark, the more time of a step the product takes."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(measured_products(mark)))
    products = [(mark, product) for mark in drawn_group.marks for product in measured_products(mark)]
    most_ms = max((product.ms for _, product in products), default=0)
    rates = []
    for mark, product in products:
        size_px = max(SMALLEST_PX, LARGEST_PX * (product.ms / most_ms) ** 0.5)
        rates.append(Rate(mark, product.operator, (product.flops_per_s or 0) / TERA, _product_text(product), size_px))
    models = [(mark, gpu) for mark in drawn_group.marks if (gpu := _gpu_model(mark))]
    peaks = [
        (mark.label, flops / TERA, escape(gpu))
        for mark, gpu in models
        if (precision := mark.cell.cell.precision) and (flops := find_peak_flops(gpu, precision))
    ]
    caption = (
        f"A mark per operator and size, over profiled ranks and repeats; at most {MOST_PRODUCTS} per cell, those that take the "
        "longest. 2 M N K FLOPs a product over the time of the kernels that it launched; on a CPU, of the operator. The area "
        "of a mark is its time in a step. The stroke: the peak of the GPU in the precision of the cell, by the data sheet."
        f"{left_out_note}"
    )
    layout = rows_layout(drawn_group, "TFLOP/s")
    figure = Figure("matrix_products", "Matrix products", caption, rows_height_px(drawn_group) + LEGEND_PX, [], layout)
    hover = "peak of %{customdata} by the data sheet: %{x:,.4~g} TFLOP/s<extra>%{y}</extra>"
    return _add_rates(figure, drawn_group, "TFLOP/s", OPERATORS, rates, "peak of the GPU", peaks, hover)


def measured_products(mark: CellMark) -> list[ProductOfStep]:
    """The matrix products of a cell whose FLOP/s are known, longest time first; at most MOST_PRODUCTS products."""
    products = list_cell_products(mark.cell)
    return [entry for entry in products if entry.flops_per_s is not None and entry.operator in OPERATORS][:MOST_PRODUCTS]


def _gpu_model(mark: CellMark) -> str:
    """The GPU model on which the profiled ranks of a cell ran; "" if there are several models, or if the traces name none."""
    names = {rank.gpu for run in list_profiled_runs(mark.cell) for rank in run.ranks}
    return names.pop() if len(names) == 1 else ""


def _product_text(product: ProductOfStep) -> str:
    batch = f"batch {product.batch:,}, " if product.batch > 1 else ""
    sizes = f"{batch}M {product.m:,}, N {product.n:,}, K {product.k:,}"
    return f"{sizes}: {notation.format_number(product.ms, 3)} ms in {notation.format_number(product.calls, 3)} calls per step"


def _add_rates(
    figure: Figure,
    group: WorkloadGroup,
    unit: str,
    colours: Mapping[str, str],
    rates: Sequence[Rate],
    peak_name: str,
    peaks: Sequence[tuple[str, float, str]],
    peak_hover: str,
) -> Figure | None:
    """Add a mark for each rate, and a stroke for each rate of a data sheet, to a figure without data; None if there are no
    rates.

    colours: kind of a rate -> its colour, in the order of the legend. peaks: of each stroke, the label of its
    cell, the rate, and what the data sheet is about. peak_name: the name of the strokes in the legend. peak_hover: what the
    reader sees when pointing at a stroke, in plotly's format.
    """
    for kind, colour in colours.items():
        if kind_rates := [rate for rate in rates if rate.kind == kind]:
            x, y = [rate.value for rate in kind_rates], [rate.mark.label for rate in kind_rates]
            sizes_px = [rate.size_px for rate in kind_rates]  # plotly draws marks with a list of sizes translucent
            marker = {"color": colour, "size": MARKER_PX if set(sizes_px) == {MARKER_PX} else sizes_px}
            hover_texts = [[rate.mark.label, rate.hover_text] for rate in kind_rates]
            cells = [rate.mark.row.id for rate in kind_rates]
            hover = f"{kind}: %{{x:,.4~g}} {unit}<br>%{{customdata[1]}}<extra>%{{customdata[0]}}</extra>"
            mark_settings = {"meta": cells, "customdata": hover_texts, "hovertemplate": hover}
            figure.data.append(scatter_trace("markers", x, y, name=kind, marker=marker, **mark_settings))
    if peaks:
        labels, values, hover_texts = map(list, zip(*peaks, strict=True))
        stroke_style = {"symbol": "line-ns", "size": STROKE_PX, "line": {"color": INK, "width": 2.5}, "color": INK}
        mark_settings = {"name": peak_name, "customdata": hover_texts, "hovertemplate": peak_hover}
        figure.data.append(scatter_trace("markers", values, labels, marker=stroke_style, **mark_settings))
    figure.layout["showlegend"] = True
    return split_rows(figure, group.marks) if rates else None
