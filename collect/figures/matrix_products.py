"""Draws the FLOP/s that the matrix products of each cell achieve, compared with the peak of the GPU."""

from __future__ import annotations

from typing import Any

from collect import notation
from collect.drawing.panel_rows import rows
from collect.drawing.stacked_bars import select_cells
from collect.figure import INK, CellMark, Figure, Group, rows_height_px, rows_layout
from collect.findings.trace_answers import profiled_runs
from collect.findings.trace_details import ProductOfStep, cell_products
from shardlab.hardware.gpu_models import peak_flops

NAME = "matrix_products"
LEGEND_PX = 30
SMALLEST_PX, LARGEST_PX, STROKE_PX = 5, 18, 18
MOST_MARKS = 12  # the most marks of a cell, for the products that take the longest
TERA = 1e12
OPERATORS = {
    "aten::mm": "var(--series-1)",
    "aten::addmm": "var(--series-2)",
    "aten::bmm": "var(--series-3)",
    "aten::baddbmm": "var(--series-4)",
    "aten::linear": "var(--series-5)",
    "aten::_scaled_mm": "var(--series-6)",
}


def draw(group: Group) -> Figure | None:
    """Draw one row per cell, with one mark for each operator and size of a matrix product.

    The larger a mark, the more time of a step the product takes.
    """
    drawn, left_out_note = select_cells(group, lambda mark: bool(measured_products(mark)))
    if not drawn.marks:
        return None
    products = [(mark, product) for mark in drawn.marks for product in measured_products(mark)]
    most_ms = max(product.ms for _, product in products)
    data = [
        _mark_trace(operator, colour, [(mark, product) for mark, product in products if product.operator == operator], most_ms)
        for operator, colour in OPERATORS.items()
        if any(product.operator == operator for _, product in products)
    ]
    peaks = [(mark.label, flops / TERA, gpu) for mark in drawn.marks if (gpu := _model(mark)) and (flops := _peak(mark, gpu))]
    if peaks:
        data.append(_peak_trace(peaks))
    frame = rows_layout(drawn, "TFLOP/s")
    frame["showlegend"] = True
    caption = (
        f"A mark per operator and size, over profiled ranks and repeats; at most {MOST_MARKS} per cell, those that take the "
        "longest. 2 M N K FLOPs a product over the time of the kernels that it launched; on a CPU, of the operator. The area "
        "of a mark is its time in a step. The stroke: the peak of the GPU in the precision of the cell, by the data sheet."
        f"{left_out_note}"
    )
    return rows(Figure(NAME, "Matrix products", caption, rows_height_px(drawn) + LEGEND_PX, data, frame), drawn.marks)


def measured_products(mark: CellMark) -> list[ProductOfStep]:
    """The matrix products of a cell whose FLOP/s are known, longest time first; at most MOST_MARKS products."""
    products = [entry for entry in cell_products(mark.cell) if entry.flops_per_s is not None and entry.operator in OPERATORS]
    return products[:MOST_MARKS]


def _model(mark: CellMark) -> str:
    """The GPU model on which the profiled ranks of a cell ran; "" if there are several models, or if the traces name none."""
    names = {rank.gpu for run in profiled_runs(mark.cell) for rank in run.ranks}
    return names.pop() if len(names) == 1 else ""


def _peak(mark: CellMark, gpu: str) -> float | None:
    return peak_flops(gpu, mark.cell.cell.precision)


def _mark_trace(operator: str, colour: str, products: list[tuple[CellMark, ProductOfStep]], most_ms: float) -> dict[str, Any]:
    sizes = [max(SMALLEST_PX, LARGEST_PX * (product.ms / most_ms) ** 0.5) for _, product in products]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": operator,
        "x": [(product.flops_per_s or 0) / TERA for _, product in products],
        "y": [mark.label for mark, _ in products],
        "meta": [mark.row.id for mark, _ in products],
        "customdata": [[mark.label, _hover_text(product)] for mark, product in products],
        "marker": {"color": colour, "size": sizes},
        "hovertemplate": f"{operator}: %{{x:,.4~g}} TFLOP/s<br>%{{customdata[1]}}<extra>%{{customdata[0]}}</extra>",
    }


def _hover_text(product: ProductOfStep) -> str:
    batch = f"batch {product.batch:,}, " if product.batch > 1 else ""
    sizes = f"{batch}M {product.m:,}, N {product.n:,}, K {product.k:,}"
    return f"{sizes}: {notation.format_number(product.ms, 3)} ms in {notation.format_number(product.calls, 3)} calls per step"


def _peak_trace(peaks: list[tuple[str, float, str]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "peak of the GPU",
        "x": [flops for _, flops, _ in peaks],
        "y": [label for label, _, _ in peaks],
        "marker": {"symbol": "line-ns", "size": STROKE_PX, "line": {"color": INK, "width": 2.5}, "color": INK},
        "hovertemplate": "peak by the data sheet: %{x:,.4~g} TFLOP/s<extra>%{y}</extra>",
    }
