"""Draws throughput over memory for cells that differ only in how they train (a contest), such as in their strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.choices.contest import group_comparable_cells, list_contenders
from collect.drawing.axes import make_axis, make_layout
from collect.drawing.traces import make_error_bars, make_points
from collect.figure import MUTED, CellMark, Figure, WorkloadGroup, escape
from collect.figures.cell_rows import CUT_NOTE, MAX_INTERVAL_MULTIPLE
from collect.figures.memory_parts import find_tensor_memory
from collect.findings.statistics import Estimate
from collect.metrics.memory import KIND_BY_MEMORY_COLUMN
from collect.strategy_style import choose_looks
from shardlab.terminal import notation

THROUGHPUT, MEMORY = "throughput_per_s", "peak_memory_bytes"


def draw(group: WorkloadGroup) -> Figure | None:
    """Draw one mark per cell of one contest: cells with the same work, ranks, nodes and batch size.

    The figure shows the contest with the most cells that have both metrics; among equals, the contest with the most ranks. None
    if this contest has fewer than two such cells.
    """
    marks = {mark.row.id: mark for mark in group.marks}
    contests = [
        (contest_key, [marks[row.id] for row in rows if _has_both_metrics(marks[row.id])], comparable_cells.values_text)
        for comparable_cells in group_comparable_cells([mark.row for mark in group.marks])
        for contest_key, rows in comparable_cells.contests.items()
    ]
    if not contests:  # all cells are imported
        return None
    (ranks, nodes, batch_size), drawn_marks, values_text = max(contests, key=lambda entry: (len(entry[1]), entry[0], entry[2]))
    if len(drawn_marks) < 2 or len({_get_units_and_kind(mark) for mark in drawn_marks}) > 1:
        return None
    throughput_unit = drawn_marks[0].row.metrics[THROUGHPUT].unit
    memory_by_cell = _estimate_memory_by_cell(drawn_marks)
    memory_unit, unit_bytes = notation.choose_unit([estimate.value for estimate in memory_by_cell.values()])
    name_by_cell = {contender.cell: escape(contender.name) for contender in list_contenders([mark.row for mark in drawn_marks])}
    drawn_marks = [marks[cell] for cell in name_by_cell]
    looks = choose_looks(
        [mark.strategy_number for mark in drawn_marks]
    )  # no lines here: cells of a strategy must differ in marks
    drawn_marks = [msgspec.structs.replace(mark, look=look) for mark, look in zip(drawn_marks, looks, strict=True)]
    front_trace = _make_front_trace(drawn_marks, memory_by_cell, unit_bytes)
    labelled_cells = [(mark, memory_by_cell[mark.row.id], name_by_cell[mark.row.id]) for mark in drawn_marks]
    cell_traces = [_make_mark(*labelled_cell, throughput_unit, memory_unit, unit_bytes) for labelled_cell in labelled_cells]
    memory_kind = memory_by_cell[drawn_marks[0].row.id].kind
    front_text = (
        "Dotted: the Pareto front; no cell is better in both than a cell on it"
        if len(front_trace["x"]) > 1
        else "One cell is the best in both"
    )
    highest = max(mark.row.metrics[THROUGHPUT].value for mark in drawn_marks)
    nodes_text = f" of {nodes} nodes" if nodes > 1 else ""
    ranks_text = f"on {ranks} rank{'s' if ranks > 1 else ''}{nodes_text}"
    conditions = ", ".join(filter(None, [f"{ranks_text} with batch {batch_size}", values_text]))
    caption = f"All cells {conditions} that can be ranked; up and to the left is better. {front_text}. Judged by the means."
    if memory_kind:
        caption += f" Memory: {memory_kind}."
    interval_end = max(min(mark.row.metrics[THROUGHPUT].high or 0, MAX_INTERVAL_MULTIPLE * highest) for mark in drawn_marks)
    if any((mark.row.metrics[THROUGHPUT].high or 0) > 1.04 * max(interval_end, highest) for mark in drawn_marks):
        caption += f" {CUT_NOTE}"
    y_axis = make_axis(throughput_unit, range=[-0.04 * interval_end, 1.04 * max(interval_end, highest)])
    layout = make_layout(make_axis(f"peak memory per rank ({memory_unit})", rangemode="tozero"), y_axis, showlegend=True)
    return Figure("head_to_head", "Head to head", caption, 420, [front_trace, *cell_traces], layout)


def find_pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The Pareto front of points (cost, gain): the indexes of the points to which no other point is superior, by rising cost.

    A point is superior to another if it is better in cost or gain, and not worse in the other of the two.
    """
    front_indexes: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1])):
        if not front_indexes or points[index][1] > points[front_indexes[-1]][1]:
            front_indexes.append(index)
    return front_indexes


def _has_both_metrics(mark: CellMark) -> bool:
    return {THROUGHPUT, MEMORY} <= mark.row.metrics.keys() and mark.row.is_ranked


def _get_units_and_kind(mark: CellMark) -> tuple[str, str, str]:
    throughput, memory = mark.row.metrics[THROUGHPUT], mark.row.metrics[MEMORY]
    return throughput.unit, memory.unit, memory.kind


def _estimate_memory_by_cell(marks: Sequence[CellMark]) -> dict[str, Estimate]:
    """The memory of each cell, by id: on a CPU the tensors of a rank, if they are known of all cells in the same way."""
    measured = {mark.row.id: mark.row.metrics[MEMORY] for mark in marks}
    tensors_by_cell = {mark.row.id: find_tensor_memory(mark.cell) for mark in marks}
    estimates = {
        cell: Estimate(memory.size_bytes, "bytes", measured[cell].n, memory.size_bytes, kind=memory.kind)
        for cell, memory in tensors_by_cell.items()
        if memory and measured[cell].kind == KIND_BY_MEMORY_COLUMN["rss_bytes"]
    }
    return estimates if len(estimates) == len(marks) and len({entry.kind for entry in estimates.values()}) == 1 else measured


def _make_front_trace(marks: Sequence[CellMark], memory_by_cell: Mapping[str, Estimate], unit_bytes: float) -> dict[str, Any]:
    points = [(memory_by_cell[mark.row.id].value / unit_bytes, mark.row.metrics[THROUGHPUT].value) for mark in marks]
    front_points = [points[index] for index in find_pareto_front(points)]
    x_values, y_values = [point[0] for point in front_points], [point[1] for point in front_points]
    line = {"color": MUTED, "width": 1.5, "dash": "dot", "shape": "hv"}
    return make_points("lines", x_values, y_values, name="front", line=line, hoverinfo="skip", showlegend=len(x_values) > 1)


def _make_mark(mark: CellMark, memory: Estimate, label: str, unit: str, memory_unit: str, unit_bytes: float) -> dict[str, Any]:
    throughput = mark.row.metrics[THROUGHPUT]
    hover_template = f"%{{y:,.4~g}} {unit}<br>%{{x:.3~g}} {memory_unit}, n = {mark.row.n}<extra>{label}</extra>"
    x_values, x_bars = [memory.value / unit_bytes], make_error_bars([memory], mark.look.colour, unit_bytes)
    interval_bars = {"error_x": x_bars, "error_y": make_error_bars([throughput], mark.look.colour)}
    mark_style = {"marker": mark.look.marks(11), "hovertemplate": hover_template}
    return make_points("markers", x_values, [throughput.value], name=label, meta=mark.row.id, **interval_bars, **mark_style)
