"""Draws the FLOP/s that the matrix products of each cell achieve, compared with the peak of the GPU."""

from __future__ import annotations

from typing import Any

from collect import notation
from collect.drawing.panel_rows import rows
from collect.drawing.stacked_bars import some
from collect.figure import INK, CellMark, Figure, Group, by_cell, by_cell_height
from collect.findings.trace_answers import profiled
from collect.findings.trace_details import ProductOfStep, products_of
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
    shown, left_out = some(group, lambda mark: bool(known(mark)))
    if not shown.marks:
        return None
    found = [(mark, product) for mark in shown.marks for product in known(mark)]
    longest = max(product.ms for _, product in found)
    data = [
        _marks(operator, colour, [(mark, product) for mark, product in found if product.operator == operator], longest)
        for operator, colour in OPERATORS.items()
        if any(product.operator == operator for _, product in found)
    ]
    peaks = [(mark.label, flops / TERA, gpu) for mark in shown.marks if (gpu := _gpu(mark)) and (flops := _peak(mark, gpu))]
    if peaks:
        data.append(_peaks(peaks))
    shape = by_cell(shown, "TFLOP/s")
    shape["showlegend"] = True
    caption = (
        f"A mark per operator and size, over profiled ranks and repeats; at most {MOST_MARKS} per cell, those that take the "
        "longest. 2 M N K FLOPs a product over the time of the kernels that it launched; on a CPU, of the operator. The area "
        "of a mark is its time in a step. The stroke: the peak of the GPU in the precision of the cell, by the data sheet."
        f"{left_out}"
    )
    return rows(Figure(NAME, "Matrix products", caption, by_cell_height(shown) + LEGEND_PX, data, shape), shown.marks)


def known(mark: CellMark) -> list[ProductOfStep]:
    """The matrix products of a cell whose FLOP/s are known, longest time first; at most MOST_MARKS products."""
    found = [one for one in products_of(mark.cell) if one.flops_per_s is not None and one.operator in OPERATORS]
    return found[:MOST_MARKS]


def _gpu(mark: CellMark) -> str:
    """The GPU model on which the profiled ranks of a cell ran; "" if there are several models, or if the traces name none."""
    names = {rank.gpu for run in profiled(mark.cell) for rank in run.ranks}
    return names.pop() if len(names) == 1 else ""


def _peak(mark: CellMark, gpu: str) -> float | None:
    return peak_flops(gpu, mark.cell.cell.precision)


def _marks(operator: str, colour: str, found: list[tuple[CellMark, ProductOfStep]], longest: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": operator,
        "x": [(product.flops_per_s or 0) / TERA for _, product in found],
        "y": [mark.label for mark, _ in found],
        "meta": [mark.row.id for mark, _ in found],
        "customdata": [[mark.label, _says(product)] for mark, product in found],
        "marker": {"color": colour, "size": [max(SMALLEST_PX, LARGEST_PX * (one.ms / longest) ** 0.5) for _, one in found]},
        "hovertemplate": f"{operator}: %{{x:,.4~g}} TFLOP/s<br>%{{customdata[1]}}<extra>%{{customdata[0]}}</extra>",
    }


def _says(product: ProductOfStep) -> str:
    batch = f"batch {product.batch:,}, " if product.batch > 1 else ""
    sizes = f"{batch}M {product.m:,}, N {product.n:,}, K {product.k:,}"
    return f"{sizes}: {notation.number(product.ms, 3)} ms in {notation.number(product.calls, 3)} calls per step"


def _peaks(peaks: list[tuple[str, float, str]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "peak of the GPU",
        "x": [flops for _, flops, _ in peaks],
        "y": [label for label, _, _ in peaks],
        "marker": {"symbol": "line-ns", "size": STROKE_PX, "line": {"color": INK, "width": 2.5}, "color": INK},
        "hovertemplate": "peak by the data sheet: %{x:,.4~g} TFLOP/s<extra>%{y}</extra>",
    }
