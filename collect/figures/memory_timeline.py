"""Draws the memory over one step by category, one panel per cell, as in studies 2 and 5."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from collect import notation
from collect.figure import MUTED, CellMark, Figure, Group, axis, layout, of_cell
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
    found = [(mark, curves) for mark in group.marks if mark.cell.completed and (curves := mark.cell.completed[0].memory)]
    if not found:
        return None
    shown = found[:MOST_PANELS]
    unit, size = notation.bytes_unit([max(map(sum, zip(*curves.points.values()))) for _, curves in shown])
    data = [
        trace
        for number, (mark, curves) in enumerate(shown, 1)
        for trace in of_cell(mark, _areas(curves, number, size, unit, {name for _, other in shown for name in other.points}))
    ]
    left_out = f" {len(found) - len(shown)} more cells are not drawn." if len(found) > len(shown) else ""
    how_many = sorted({curves.steps for _, curves in shown})
    steps = "One step" if how_many == [1] else f"{' or '.join(map(str, how_many))} consecutive steps"
    caption = f"{steps} on rank 0, recorded by the instrument `memory: categories`. The areas are stacked.{left_out}"
    return Figure("memory_timeline", "Memory over a step", caption, 92 + PANEL_PX * len(shown), data, _panels(shown, unit))


def written(category: str) -> str:
    """The words that figures show for a memory category, such as `optimizer state` for `optimizer_state`."""
    return "master copy" if category == "master_parameter" else category.replace("_", " ")


def _areas(curves: MemoryCurves, number: int, size: float, unit: str, named: set[str]) -> list[dict[str, Any]]:
    picked = _picked(curves)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"width": 0.5, "color": colour, "shape": "hv"},
            "fillcolor": colour,
            "stackgroup": f"panel-{number}",
            "name": written(name),
            "legendgroup": name,
            "showlegend": number == 1,
            "x": [curves.t_ms[index] for index in picked],
            "y": [curves.points[name][index] / size for index in picked],
            "xaxis": _axis("x", number),
            "yaxis": _axis("y", number),
            "hovertemplate": f"%{{y:.4~g}} {unit} at %{{x:.4~g}} ms",
        }
        for name, colour in CATEGORIES.items()
        if name in named and name in curves.points
    ]


def _picked(curves: MemoryCurves) -> list[int]:
    """Choose the points of the curves that are drawn, and return their indexes.

    If there are more than MOST_POINTS points, they are divided into MOST_POINTS sections. Of each section, the point at which
    the sum of all categories is largest is drawn.
    """
    sums = list(map(sum, zip(*curves.points.values())))
    if len(sums) <= MOST_POINTS:
        return list(range(len(sums)))
    bounds = [len(sums) * index // MOST_POINTS for index in range(MOST_POINTS + 1)]
    return [max(range(begin, end), key=sums.__getitem__) for begin, end in pairwise(bounds)]


def _panels(shown: list[tuple[CellMark, MemoryCurves]], unit: str) -> dict[str, Any]:
    shape = layout({}, {}, showlegend=True)
    shape["annotations"] = []
    for number, (mark, _) in enumerate(shown, 1):
        top, bottom = 1 - (number - 1 + GAP) / len(shown), 1 - number / len(shown) + 0.02
        last = number == len(shown)
        title = "ms since the first of these steps began" if last else ""
        shape[_axis("xaxis", number)] = axis(title, anchor=_axis("y", number), showgrid=False)
        panel = axis(unit, domain=[bottom, top], rangemode="tozero", nticks=4, anchor=_axis("x", number))
        shape[_axis("yaxis", number)] = panel
        at = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
        shape["annotations"].append(at | {"text": mark.label, "showarrow": False, "font": {"size": 12, "color": MUTED}})
    return shape


def _axis(name: str, number: int) -> str:
    """Plotly's name of an axis, such as `x2`. name: `x`, `y`, `xaxis` or `yaxis`. number: the number of the axis, from 1."""
    return name if number == 1 else f"{name}{number}"
