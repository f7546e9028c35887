"""Draws the rates that parts of a step reach, beside the rate of the data sheet: bus bandwidths and FLOP/s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collect.drawing.axes import make_rows_layout, sum_rows_px
from collect.drawing.panel_rows import split_rows
from collect.drawing.stacked_bars import select_cells
from collect.drawing.traces import make_points
from collect.figure import INK, SERIES, CellMark, Figure, WorkloadGroup, escape
from collect.figures.step_parts import COLLECTIVES
from collect.findings.trace_answers import GroupTraffic, list_cell_traffic, list_profiled_runs
from collect.findings.trace_details import ProductOfStep, list_cell_products
from shardlab.hardware.gpu_models import find_peak_flops
from shardlab.terminal import notation

LEGEND_PX, STROKE_PX, MARKER_PX = 30, 18, 11
SMALLEST_MARK_PX, LARGEST_MARK_PX = 5, 18  # sizes of the marks of matrix products
MOST_PRODUCTS = 12  # the most marks of a cell, for the products that take the longest
TERA = 1e12
OPERATORS = {"aten::mm": SERIES[1], "aten::addmm": SERIES[2], "aten::bmm": SERIES[3], "aten::baddbmm": SERIES[4]} | {
    "aten::linear": SERIES[5], "aten::_scaled_mm": SERIES[6],
}  # fmt: skip  # operator of a matrix product -> its colour


class Rate(NamedTuple):
    """A rate that a part of a step of a cell reaches."""

    mark: CellMark
    part_name: str
    """The name of the part in the legend, such as `all_reduce`."""
    axis_value: float
    """The rate in the unit of the axis."""
    hover_text: str
    """What the reader sees besides the rate when pointing at the mark."""
    size_px: float = MARKER_PX
    """The size of the mark."""


def draw_bandwidth(group: WorkloadGroup) -> Figure | None:
    """Draw the bus bandwidth of each collective: one row per cell, with one mark for each collective of each process group
    whose bandwidth is known, compared with the bandwidth of the link between the GPUs."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(list_measured_collectives(mark)))
    uses = [(mark, use) for mark in drawn_group.marks for use in list_measured_collectives(mark)]
    rates = [Rate(mark, use.collective, use.bus_gb_per_s or 0, escape(_describe_traffic(use))) for mark, use in uses]
    link_strokes = {(mark.label, use.link_gb_per_s, use.link or "") for mark, use in uses if use.link_gb_per_s is not None}
    caption = (
        "A mark per collective and process group, over profiled ranks and repeats. Bus bandwidth as nccl-tests defines it: "
        "size of the message over the time of the transfer, times a factor of the collective, so that it compares with the "
        "bandwidth of a link. Without traces of all ranks the time includes waiting for slow ranks. The stroke: the link "
        f"between the GPUs of a host in one direction, by the data sheet.{left_out_note}"
    )
    layout = make_rows_layout(drawn_group, "bus bandwidth in GB/s")
    figure = Figure("bandwidth", "Bandwidth of collectives", caption, sum_rows_px(drawn_group) + LEGEND_PX, [], layout)
    stroke_hover = "%{customdata}: %{x:,.4~g} GB/s in one direction<extra>%{y}</extra>"
    return _add_rates(figure, drawn_group, "GB/s", COLLECTIVES, rates, "link", sorted(link_strokes, key=str), stroke_hover)


def list_measured_collectives(mark: CellMark) -> list[GroupTraffic]:
    """The collectives of a cell whose bus bandwidth is known and whose kind has its own colour in figures."""
    return [use for use in list_cell_traffic(mark.cell) if use.bus_gb_per_s is not None and use.collective in COLLECTIVES]


def _describe_traffic(use: GroupTraffic) -> str:
    size_text = "" if use.message_bytes is None else f", {notation.format_number(use.message_bytes / notation.MIB, 3)} MiB each"
    return f"process group {use.group}: {notation.format_number(use.calls, 3)} calls per step{size_text}"


def draw_matrix_products(group: WorkloadGroup) -> Figure | None:
    """Draw the FLOP/s of matrix products: one row per cell, with one mark for each operator and size, compared with the peak of
    the GPU. The larger a mark, the more time of a step the product takes."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(list_measured_products(mark)))
    products_of_marks = [(mark, product) for mark in drawn_group.marks for product in list_measured_products(mark)]
    longest_ms = max((product.ms for _, product in products_of_marks), default=0)
    rates = []
    for mark, product in products_of_marks:
        size_px = max(SMALLEST_MARK_PX, LARGEST_MARK_PX * (product.ms / longest_ms) ** 0.5)
        rates.append(Rate(mark, product.operator, (product.flops_per_s or 0) / TERA, _describe_product(product), size_px))
    gpus_of_marks = [(mark, gpu_name) for mark in drawn_group.marks if (gpu_name := _find_gpu_model(mark))]
    peak_strokes = [
        (mark.label, flops_per_s / TERA, escape(gpu_name))
        for mark, gpu_name in gpus_of_marks
        if (precision := mark.cell.cell.precision) and (flops_per_s := find_peak_flops(gpu_name, precision))
    ]
    caption = (
        f"A mark per operator and size, over profiled ranks and repeats; at most {MOST_PRODUCTS} per cell, those that take the "
        "longest. 2 M N K FLOPs a product over the time of the kernels that it launched; on a CPU, of the operator. The area "
        "of a mark is its time in a step. The stroke: the peak of the GPU in the precision of the cell, by the data sheet."
        f"{left_out_note}"
    )
    layout = make_rows_layout(drawn_group, "TFLOP/s")
    figure = Figure("matrix_products", "Matrix products", caption, sum_rows_px(drawn_group) + LEGEND_PX, [], layout)
    stroke_hover = "peak of %{customdata} by the data sheet: %{x:,.4~g} TFLOP/s<extra>%{y}</extra>"
    return _add_rates(figure, drawn_group, "TFLOP/s", OPERATORS, rates, "peak of the GPU", peak_strokes, stroke_hover)


def list_measured_products(mark: CellMark) -> list[ProductOfStep]:
    """The matrix products of a cell whose FLOP/s are known, longest time first; at most MOST_PRODUCTS products."""
    products = list_cell_products(mark.cell)
    return [entry for entry in products if entry.flops_per_s is not None and entry.operator in OPERATORS][:MOST_PRODUCTS]


def _find_gpu_model(mark: CellMark) -> str:
    """The GPU model on which the profiled ranks of a cell ran; "" if there are several models, or if the traces name none."""
    gpu_names = {rank.gpu for run in list_profiled_runs(mark.cell) for rank in run.ranks}
    return gpu_names.pop() if len(gpu_names) == 1 else ""


def _describe_product(product: ProductOfStep) -> str:
    batch_text = f"batch {product.batch:,}, " if product.batch > 1 else ""
    sizes = f"{batch_text}M {product.m:,}, N {product.n:,}, K {product.k:,}"
    return f"{sizes}: {notation.format_number(product.ms, 3)} ms in {notation.format_number(product.calls, 3)} calls per step"


def _add_rates(
    figure: Figure,
    group: WorkloadGroup,
    unit: str,
    colour_by_part: Mapping[str, str],
    rates: Sequence[Rate],
    peak_name: str,
    peak_strokes: Sequence[tuple[str, float, str]],
    peak_hover: str,
) -> Figure | None:
    """Add a mark for each rate, and a stroke for each rate of a data sheet, to a figure without data; None if there are no
    rates.

    colour_by_part: kind of a rate -> its colour, in the order of the legend. peak_strokes: of each stroke, the label of its
    cell, the rate, and what the data sheet is about. peak_name: the name of the strokes in the legend. peak_hover: what the
    reader sees when pointing at a stroke, in plotly's format.
    """
    for part_name, colour in colour_by_part.items():
        if part_rates := [rate for rate in rates if rate.part_name == part_name]:
            x_values, y_values = [rate.axis_value for rate in part_rates], [rate.mark.label for rate in part_rates]
            sizes_px = [rate.size_px for rate in part_rates]  # plotly draws marks with a list of sizes translucent
            marker = {"color": colour, "size": MARKER_PX if set(sizes_px) == {MARKER_PX} else sizes_px}
            hover_texts = [[rate.mark.label, rate.hover_text] for rate in part_rates]
            cell_ids = [rate.mark.row.id for rate in part_rates]
            hover_template = f"{part_name}: %{{x:,.4~g}} {unit}<br>%{{customdata[1]}}<extra>%{{customdata[0]}}</extra>"
            mark_settings = {"meta": cell_ids, "customdata": hover_texts, "hovertemplate": hover_template}
            figure.data.append(make_points("markers", x_values, y_values, name=part_name, marker=marker, **mark_settings))
    if peak_strokes:
        cell_labels, peak_values, hover_texts = map(list, zip(*peak_strokes, strict=True))
        stroke_style = {"symbol": "line-ns", "size": STROKE_PX, "line": {"color": INK, "width": 2.5}, "color": INK}
        mark_settings = {"name": peak_name, "customdata": hover_texts, "hovertemplate": peak_hover}
        figure.data.append(make_points("markers", peak_values, cell_labels, marker=stroke_style, **mark_settings))
    figure.layout["showlegend"] = True
    return split_rows(figure, group.marks) if rates else None
