"""Draws the bubble of a pipeline, the share of time in which its ranks wait, over the number of micro-batches."""

from __future__ import annotations

from typing import Any

from collect.figure import INK, CellMark, Figure, Group, axis, layout
from collect.metrics.bubble import theory_pct
from collect.strategy_style import DASHES, look

NAME = "bubble_pct"
CURVE_POINTS = 40


def draw(group: Group) -> Figure | None:
    """Draw one theoretical curve per number of ranks, and one mark for each cell whose bubble was measured.

    The fill of a mark shows the number of ranks of its cell.
    """
    marks = [mark for mark in group.marks if NAME in mark.row.metrics]
    if not marks:
        return None
    ranks = sorted({mark.cell.cell.pp for mark in marks})
    passes = sorted({mark.cell.cell.gradient_accumulation_steps for mark in marks})
    strategies = list(dict.fromkeys(mark.cell.cell.strategy for mark in marks))
    data = [_curve(pp, passes, DASHES[place % len(DASHES)]) for place, pp in enumerate(ranks)]
    for place, pp in enumerate(ranks):
        for strategy in strategies:
            found = [mark for mark in marks if (mark.cell.cell.strategy, mark.cell.cell.pp) == (strategy, pp)]
            if found:
                data.append(_measured(f"{strategy}, P = {pp}", found, place))
    caption = (
        "Marks: the share of the forward and backward time in which a rank waits, if all stages take equally long; the time "
        "for sending is included. Lines: (P - 1) / (M + P - 1) for P ranks and M micro-batches. Some papers divide the waiting "
        "time by the busy time instead, (P - 1) / M, which gives larger numbers; this is not drawn."
    )
    x = axis("micro-batches of a step", type="log", tickvals=passes, ticktext=[f"{count}" for count in passes], showgrid=False)
    shape = layout(x, axis("waiting, % of forward and backward", rangemode="tozero"), showlegend=True)
    return Figure(NAME, "Pipeline bubble", caption, 440, data, shape)


def _curve(pp: int, passes: list[int], dash: str) -> dict[str, Any]:
    """The theoretical bubble of a pipeline with `pp` ranks.

    The curve covers the measured numbers of micro-batches, extended by a factor of 1.5 on both sides, so that there is a curve
    even if only one number was measured.
    """
    first, last = passes[0] / 1.5, passes[-1] * 1.5
    x = [first * (last / first) ** (point / (CURVE_POINTS - 1)) for point in range(CURVE_POINTS)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"theory, P = {pp}",
        "x": x,
        "y": [theory_pct(pp, count) for count in x],
        "line": {"color": INK, "dash": dash, "width": 1.5},
        "hovertemplate": "%{y:.3~g} % by theory",
    }


def _measured(name: str, marks: list[CellMark], variant: int) -> dict[str, Any]:
    """The marks of the measured cells of one strategy with one number of ranks.

    variant: the index of this number of ranks in the sorted list of all numbers of ranks. It determines the fill of the marks.
    """
    own = look(marks[0].strategy, variant)
    found = [mark.row.metrics[NAME] for mark in marks]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [mark.cell.cell.gradient_accumulation_steps for mark in marks],
        "y": [one.value for one in found],
        "error_y": {
            "type": "data",
            "visible": any(one.low is not None for one in found),
            "symmetric": False,
            "array": [None if one.high is None else one.high - one.value for one in found],
            "arrayminus": [None if one.low is None else one.value - one.low for one in found],
            "color": own.colour,
            "thickness": 1.5,
            "width": 4,
        },
        "customdata": [mark.label for mark in marks],
        "meta": [mark.row.id for mark in marks],
        "marker": own.marks(10),
        "hovertemplate": "%{y:.3~g} % measured at %{x} micro-batches<extra>%{customdata}</extra>",
    }
