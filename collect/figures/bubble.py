"""Draws the bubble of a pipeline, the share of time in which its ranks wait, over the number of micro-batches."""

from __future__ import annotations

from typing import Any

from collect.drawing.axes import make_axis, make_layout
from collect.drawing.traces import make_error_bars, make_points
from collect.figure import INK, CellMark, Figure, WorkloadGroup
from collect.metrics.bubble import compute_theoretical_bubble_pct
from collect.strategy_style import DASHES, make_strategy_look

BUBBLE_METRIC = "bubble_pct"
CURVE_POINTS = 40


def draw(group: WorkloadGroup) -> Figure | None:
    """Draw one theoretical curve per number of ranks, and one mark for each cell whose bubble was measured.

    The fill of a mark shows the number of ranks of its cell.
    """
    marks = [mark for mark in group.marks if BUBBLE_METRIC in mark.row.metrics]
    if not marks:
        return None
    cells = [mark.cell.cell.require_training() for mark in marks]
    rank_counts = sorted({cell.pp for cell in cells})
    pass_counts = sorted({cell.gradient_accumulation_steps for cell in cells})
    strategies = list(dict.fromkeys(mark.cell.cell.strategy for mark in marks))
    traces = [
        _make_theory_curve(pp, pass_counts, DASHES[fill_index % len(DASHES)]) for fill_index, pp in enumerate(rank_counts)
    ]
    for fill_index, pp in enumerate(rank_counts):
        for strategy in strategies:
            strategy_marks = [mark for mark in marks if (mark.cell.cell.strategy, mark.cell.cell.pp) == (strategy, pp)]
            if strategy_marks:
                traces.append(_make_measured_marks(f"{strategy}, P = {pp}", strategy_marks, fill_index))
    caption = (
        "Marks: the share of the forward and backward time in which a rank waits, if all stages take equally long; the time "
        "for sending is included. Lines: (P - 1) / (M + P - 1) for P ranks and M micro-batches. Some papers divide the waiting "
        "time by the busy time instead, (P - 1) / M, which gives larger numbers; this is not drawn."
    )
    x_axis = make_axis(
        "micro-batches of a step",
        type="log",
        tickvals=pass_counts,
        ticktext=[f"{count}" for count in pass_counts],
        showgrid=False,
    )
    layout = make_layout(x_axis, make_axis("waiting, % of forward and backward", rangemode="tozero"), showlegend=True)
    return Figure(BUBBLE_METRIC, "Pipeline bubble", caption, 440, traces, layout)


def _make_theory_curve(pp: int, pass_counts: list[int], dash: str) -> dict[str, Any]:
    """The theoretical bubble of a pipeline with `pp` ranks.

    The curve covers the measured numbers of micro-batches, extended by a factor of 1.5 on both sides, so that there is a curve
    even if only one number was measured.
    """
    first_x, last_x = pass_counts[0] / 1.5, pass_counts[-1] * 1.5
    x = [first_x * (last_x / first_x) ** (point / (CURVE_POINTS - 1)) for point in range(CURVE_POINTS)]
    curve_style = {"line": {"color": INK, "dash": dash, "width": 1.5}, "hovertemplate": "%{y:.3~g} % by theory"}
    return make_points(
        "lines",
        x,
        [compute_theoretical_bubble_pct(pp, pass_count) for pass_count in x],
        name=f"theory, P = {pp}",
        **curve_style,
    )


def _make_measured_marks(legend_name: str, marks: list[CellMark], fill_index: int) -> dict[str, Any]:
    """The marks of the measured cells of one strategy with one number of ranks.

    fill_index: the index of this number of ranks in the sorted list of all numbers of ranks. It determines the fill of the
    marks.
    """
    mark_look = make_strategy_look(marks[0].strategy_number, fill_index)
    estimates = [mark.row.metrics[BUBBLE_METRIC] for mark in marks]
    return make_points(
        "markers",
        [mark.cell.cell.gradient_accumulation_steps for mark in marks],
        [estimate.value for estimate in estimates],
        name=legend_name,
        error_y=make_error_bars(estimates, mark_look.colour),
        customdata=[mark.label for mark in marks],
        meta=[mark.row.id for mark in marks],
        marker=mark_look.marks(10),
        hovertemplate="%{y:.3~g} % measured at %{x} micro-batches<extra>%{customdata}</extra>",
    )
