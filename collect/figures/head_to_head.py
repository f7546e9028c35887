"""Draws throughput over memory for cells that differ only in how they train (a contest), such as in their strategies."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec

from collect import notation
from collect.choices.contest import contenders, grounds
from collect.figure import MUTED, CellMark, Figure, Group, axis, layout
from collect.figures.throughput import CUT, MOST_INTERVAL
from collect.findings.statistics import Estimate
from collect.strategy_style import variants

THROUGHPUT, MEMORY = "throughput_per_s", "peak_memory_bytes"


def draw(group: Group) -> Figure | None:
    """Draw one mark per cell of one contest: cells with the same work, ranks, nodes and batch size.

    The figure shows the contest with the most cells that have both metrics; among equals, the contest with the most ranks. None
    if this contest has fewer than two such cells.
    """
    marks = {mark.row.id: mark for mark in group.marks}
    contests = [
        (key, [marks[row.id] for row in rows if _has_both(marks[row.id])], ground.about)
        for ground in grounds([mark.row for mark in group.marks])
        for key, rows in ground.contests.items()
    ]
    (ranks, nodes, batch), shown, about = max(contests, key=lambda entry: (len(entry[1]), entry[0], entry[2]))
    if len(shown) < 2 or len({_kinds(mark) for mark in shown}) > 1:
        return None
    unit = shown[0].row.metrics[THROUGHPUT].unit
    size_unit, size = notation.bytes_unit([mark.row.metrics[MEMORY].value for mark in shown])
    names = {one.cell: html.escape(one.name, quote=False) for one in contenders([mark.row for mark in shown])}
    shown = [marks[cell] for cell in names]
    looks = variants([mark.strategy for mark in shown])  # this figure has no lines, so cells of a strategy must differ in marks
    shown = [msgspec.structs.replace(mark, look=look) for mark, look in zip(shown, looks, strict=True)]
    ahead = _front(shown, size)
    data = [ahead, *(_mark(mark, names[mark.row.id], unit, size_unit, size) for mark in shown)]
    kind = shown[0].row.metrics[MEMORY].kind
    told = (
        "Dotted: the Pareto front; no cell is better in both than a cell on it"
        if len(ahead["x"]) > 1
        else "One cell is the best in both"
    )
    highest = max(mark.row.metrics[THROUGHPUT].value for mark in shown)
    on_nodes = f" of {nodes} nodes" if nodes > 1 else ""
    where = ", ".join(filter(None, [f"on {ranks} rank{'s' if ranks > 1 else ''}{on_nodes} with batch {batch}", about]))
    caption = f"All cells {where} that can be ranked; up and to the left is better. {told}. Judged by the means."
    if kind:
        caption += f" Memory: {kind}."
    top = max(min(mark.row.metrics[THROUGHPUT].high or 0, MOST_INTERVAL * highest) for mark in shown)
    if any((mark.row.metrics[THROUGHPUT].high or 0) > 1.04 * max(top, highest) for mark in shown):
        caption += f" {CUT}"
    y = axis(unit, range=[-0.04 * top, 1.04 * max(top, highest)])
    shape = layout(axis(f"peak memory per rank ({size_unit})"), y, showlegend=True)
    return Figure("head_to_head", "Head to head", caption, 420, data, shape)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The Pareto front of points (cost, gain): the indexes of the points to which no other point is superior, by rising cost.

    A point is superior to another if it is better in cost or gain, and not worse in the other of the two.
    """
    kept: list[int] = []
    for place in sorted(range(len(points)), key=lambda place: (points[place][0], -points[place][1])):
        if not kept or points[place][1] > points[kept[-1]][1]:
            kept.append(place)
    return kept


def _has_both(mark: CellMark) -> bool:
    return {THROUGHPUT, MEMORY} <= mark.row.metrics.keys() and mark.row.is_ranked


def _kinds(mark: CellMark) -> tuple[str, str, str]:
    throughput, memory = mark.row.metrics[THROUGHPUT], mark.row.metrics[MEMORY]
    return throughput.unit, memory.unit, memory.kind


def _front(shown: Sequence[CellMark], size: float) -> dict[str, Any]:
    points = [(mark.row.metrics[MEMORY].value / size, mark.row.metrics[THROUGHPUT].value) for mark in shown]
    kept = [points[place] for place in front(points)]
    line = {"color": MUTED, "width": 1.5, "dash": "dot", "shape": "hv"}
    x, y = [point[0] for point in kept], [point[1] for point in kept]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "front",
        "x": x,
        "y": y,
        "line": line,
        "hoverinfo": "skip",
        "showlegend": len(x) > 1,
    }


def _mark(mark: CellMark, name: str, unit: str, size_unit: str, size: float) -> dict[str, Any]:
    throughput, memory = mark.row.metrics[THROUGHPUT], mark.row.metrics[MEMORY]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "meta": mark.row.id,
        "x": [memory.value / size],
        "y": [throughput.value],
        "error_x": _interval(memory, size, mark.look.colour),
        "error_y": _interval(throughput, 1, mark.look.colour),
        "marker": mark.look.marks(11),
        "hovertemplate": f"%{{y:,.4~g}} {unit}<br>%{{x:.3~g}} {size_unit}, n = {mark.row.n}<extra>{name}</extra>",
    }


def _interval(estimate: Estimate, size: float, colour: str) -> dict[str, Any]:
    if estimate.low is None or estimate.high is None:
        return {"visible": False}
    half = (estimate.high - estimate.low) / 2 / size
    return {"type": "data", "array": [half], "color": colour, "thickness": 1.5, "width": 4}
