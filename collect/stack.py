"""Bars made of parts, one bar a cell, for the cells that have it: how breakdowns of time and of memory are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from collect.figure import INK, Figure, Group, Mark, axis, by_cell, by_cell_height

MOST_BARS = 60  # of a figure; nobody compares more at once
LEGEND_PX = 46
GAP = 0.14  # of the width, between two panels
THICK = 0.56  # of a line
END_PX = 60  # for the text at the end of the longest bar


class Part(NamedTuple):
    """A part of every bar. values: one per cell of the group, None where that cell has no such part."""

    name: str
    colour: str
    values: Sequence[float | None]


class Panel(NamedTuple):
    """What lies over one x axis. unit: of the values, in the hover; ends: the text at the end of each cell's bar; estimates:
    where a stroke stands, None for none."""

    x_title: str
    unit: str
    parts: Sequence[Part]
    ends: Sequence[str]
    estimates: Sequence[float | None] = ()


def some(group: Group, has: Callable[[Mark], bool]) -> tuple[Group, str]:
    """The group's first cells that have it, and a sentence about those for which there is no room, if any."""
    marks = [mark for mark in group.marks if has(mark)]
    left_out = f" {len(marks) - MOST_BARS} more cells are not drawn." if len(marks) > MOST_BARS else ""
    return msgspec.structs.replace(group, marks=marks[:MOST_BARS]), left_out


def draw(name: str, title: str, caption: str, group: Group, panels: Sequence[Panel]) -> Figure:
    """The panels side by side, over the same lines of cells."""
    shape = by_cell(group, "")
    shape |= {"barmode": "stack", "showlegend": True, "uniformtext": {"mode": "hide", "minsize": 10}}
    shape["legend"] |= {"traceorder": "normal"}
    shape["margin"]["r"] = END_PX
    data: list[dict[str, Any]] = []
    named: set[str] = set()
    width = (1 - GAP * (len(panels) - 1)) / len(panels)
    for place, panel in enumerate(panels):
        number = str(place + 1) if place else ""
        start = place * (width + GAP)
        nticks = 5 if len(panels) == 1 else 3
        over = axis(panel.x_title, rangemode="tozero", nticks=nticks, tickangle=0, domain=[start, start + width], anchor="y")
        shape[f"xaxis{number}"] = over
        totals = [sum(value or 0 for value in bar) for bar in zip(*(part.values for part in panel.parts), strict=True)]
        drawn = [_part(group, part, panel, totals) for part in panel.parts]
        if any(estimate is not None for estimate in panel.estimates):
            drawn.append(_estimates(group, panel))
        for entry in drawn:
            data.append(entry | {"xaxis": f"x{number}", "showlegend": entry["name"] not in named})
            named.add(entry["name"])
        data.append(_ends(group, panel, totals) | {"xaxis": f"x{number}"})
    return Figure(name, title, caption, by_cell_height(group) + LEGEND_PX, data, shape)


def _part(group: Group, part: Part, panel: Panel, totals: Sequence[float]) -> dict[str, Any]:
    """One part of every bar; its share of the bar stands in it where it fits."""
    known = [
        (mark.label, value, 100 * value / total)
        for mark, value, total in zip(group.marks, part.values, totals, strict=True)
        if value is not None and total
    ]
    one_of_many = len(panel.parts) > 1
    share = ", %{customdata:.3~g} % of the bar" if one_of_many else ""
    return {
        "type": "bar",
        "orientation": "h",
        "name": part.name,
        "legendgroup": part.name,
        "x": [value for _, value, _ in known],
        "y": [label for label, _, _ in known],
        "customdata": [share for _, _, share in known],
        "text": [f"{share:.1f} %" if one_of_many and share < 99.95 else "" for _, _, share in known],
        "textposition": "inside",
        "textangle": 0,
        "insidetextanchor": "middle",
        "marker": {"color": part.colour},
        "width": THICK,
        "hovertemplate": f"{part.name}: %{{x:,.4~g}} {panel.unit}{share}<extra>%{{y}}</extra>",
    }


def _estimates(group: Group, panel: Panel) -> dict[str, Any]:
    known = [(mark.label, value) for mark, value in zip(group.marks, panel.estimates, strict=True) if value is not None]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "estimate",
        "legendgroup": "estimate",
        "x": [value for _, value in known],
        "y": [label for label, _ in known],
        "marker": {"symbol": "line-ns", "size": 24, "line": {"color": INK, "width": 2.5}, "color": INK},
        "hovertemplate": f"estimate: %{{x:,.4~g}} {panel.unit}<extra>%{{y}}</extra>",
        "cliponaxis": False,
    }


def _ends(group: Group, panel: Panel, totals: Sequence[float]) -> dict[str, Any]:
    """Text right of each bar, and of its estimate where that reaches further."""
    estimates = panel.estimates or [None] * len(totals)
    reaches = [max(total, estimate or 0) for total, estimate in zip(totals, estimates, strict=True)]
    return {
        "type": "scatter",
        "mode": "text",
        "x": reaches,
        "y": group.labels,
        "text": [f"  {end}" for end in panel.ends],
        "textposition": "middle right",
        "textfont": {"color": INK, "size": 12},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
