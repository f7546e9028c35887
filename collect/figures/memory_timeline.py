"""Draws the memory over one step by category, one panel per cell, as in studies 2 and 5."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from collect import notation
from collect.figure import MUTED, CellMark, Figure, Group, add_cell_id, axis, layout
from collect.sources.memory import MemoryCurves

PANEL_PX = 190
GAP = 0.2  # share of the height of a panel that its title needs
MOST_PANELS = 6
MOST_POINTS = 300  # the most points of a curve
# Memory category -> colour, in the order in which the areas are stacked: constant categories are at the bottom.
CATEGORIES = {
    "parameter": "var(--series-1)",
    "master_parameter": "var(--ink)",
    "optimizer_state": "var(--series-2)",
    "gradient": "var(--series-3)",
    "buffer": "var(--series-7)",
    "gathered": "var(--series-6)",
    "activation": "var(--series-4)",
    "temporary": "var(--series-5)",
    "unknown": MUTED,  # memory that belongs to no category; only recorded at the memory peak of a GPU
}


def draw(group: Group) -> Figure | None:
    """Draw one panel for each of the first MOST_PANELS cells whose first completed repeat recorded the memory of rank 0 by
    category."""
    mark_curves = [(mark, curves) for mark in group.marks if mark.cell.completed and (curves := mark.cell.completed[0].memory)]
    if not mark_curves:
        return None
    drawn = mark_curves[:MOST_PANELS]
    unit, size = notation.bytes_unit([max(map(sum, zip(*curves.points.values()))) for _, curves in drawn])
    data = [
        trace
        for number, (mark, curves) in enumerate(drawn, 1)
        for trace in add_cell_id(
            mark, _area_traces(curves, number, size, unit, {name for _, other in drawn for name in other.points})
        )
    ]
    left_out_note = f" {len(mark_curves) - len(drawn)} more cells are not drawn." if len(mark_curves) > len(drawn) else ""
    step_counts = sorted({curves.steps for _, curves in drawn})
    steps = "One step" if step_counts == [1] else f"{' or '.join(map(str, step_counts))} consecutive steps"
    caption = f"{steps} on rank 0, recorded by the instrument `memory: categories`. The areas are stacked.{left_out_note}"
    return Figure("memory_timeline", "Memory over a step", caption, 92 + PANEL_PX * len(drawn), data, _layout(drawn, unit))


def category_label(category: str) -> str:
    """The words that figures show for a memory category, such as `optimizer state` for `optimizer_state`."""
    return "master copy" if category == "master_parameter" else category.replace("_", " ")


def _area_traces(curves: MemoryCurves, number: int, size: float, unit: str, drawn_categories: set[str]) -> list[dict[str, Any]]:
    indexes = _pick_indexes(curves)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"width": 0.5, "color": colour, "shape": "hv"},
            "fillcolor": colour,
            "stackgroup": f"panel-{number}",
            "name": category_label(name),
            "legendgroup": name,
            "showlegend": number == 1,
            "x": [curves.t_ms[index] for index in indexes],
            "y": [curves.points[name][index] / size for index in indexes],
            "xaxis": _axis_name("x", number),
            "yaxis": _axis_name("y", number),
            "hovertemplate": f"%{{y:.4~g}} {unit} at %{{x:.4~g}} ms",
        }
        for name, colour in CATEGORIES.items()
        if name in drawn_categories and name in curves.points
    ]


def _pick_indexes(curves: MemoryCurves) -> list[int]:
    """Choose the points of the curves that are drawn, and return their indexes.

    If there are more than MOST_POINTS points, they are divided into MOST_POINTS sections. Of each section, the point at which
    the sum of all categories is largest is drawn.
    """
    totals = list(map(sum, zip(*curves.points.values())))
    if len(totals) <= MOST_POINTS:
        return list(range(len(totals)))
    bounds = [len(totals) * index // MOST_POINTS for index in range(MOST_POINTS + 1)]
    return [max(range(begin, end), key=totals.__getitem__) for begin, end in pairwise(bounds)]


def _layout(mark_curves: list[tuple[CellMark, MemoryCurves]], unit: str) -> dict[str, Any]:
    frame = layout({}, {}, showlegend=True)
    frame["annotations"] = []
    for number, (mark, _) in enumerate(mark_curves, 1):
        top, bottom = 1 - (number - 1 + GAP) / len(mark_curves), 1 - number / len(mark_curves) + 0.02
        is_last = number == len(mark_curves)
        title = "ms since the first of these steps began" if is_last else ""
        frame[_axis_name("xaxis", number)] = axis(title, anchor=_axis_name("y", number), showgrid=False)
        panel = axis(unit, domain=[bottom, top], rangemode="tozero", nticks=4, anchor=_axis_name("x", number))
        frame[_axis_name("yaxis", number)] = panel
        anchor = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
        frame["annotations"].append(anchor | {"text": mark.label, "showarrow": False, "font": {"size": 12, "color": MUTED}})
    return frame


def _axis_name(name: str, number: int) -> str:
    """Plotly's name of an axis, such as `x2`. name: `x`, `y`, `xaxis` or `yaxis`. number: the number of the axis, from 1."""
    return name if number == 1 else f"{name}{number}"
