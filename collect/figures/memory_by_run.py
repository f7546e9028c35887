"""Draws the memory of a rank over time for one run of each cell. The figure shows whether memory stays constant or grows."""

from __future__ import annotations

from typing import Any

import polars as pl

from collect import notation
from collect.drawing import small_multiples
from collect.figure import MAX_MARKED, Figure, Group, axis, layout, max_points_per_line, order_by_visibility, thin_points
from collect.loading.loaded_run import LoadedRun
from collect.metrics.memory import KINDS, find_memory_column
from collect.sources.steps import find_timed_window, select_unwatched


def draw(group: Group) -> Figure | None:
    """Draw one line per cell over its timed steps, from the first completed repeat that did not resume from a checkpoint."""
    curves: dict[str, tuple[str, list[float], list[int | None]]] = {}
    for mark in group.marks:
        run = next((run for run in mark.cell.completed if not run.resumed), None)
        if run is not None and (curve := _memory_curve(run)) is not None:
            curves[mark.label] = curve
    if not curves:
        return None
    unit, size = notation.bytes_unit([value for _, _, values in curves.values() for value in values if value is not None])
    marks = [mark for mark in group.marks if mark.label in curves]
    data: list[dict[str, Any]] = []
    for mark, visible in order_by_visibility(marks):
        kind, seconds, values = curves[mark.label]
        x, y = thin_points(seconds, values, max_points_per_line(len(marks)))
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": mark.label,
                "meta": mark.row.id,
                "x": [round(moment, 3) for moment in x],
                "y": [None if value is None else float(f"{value / size:.5g}") for value in y],
                "line": mark.look.line,
                "marker": mark.look.marks(4) if len(x) <= MAX_MARKED else mark.look.sparse_marks,
                "connectgaps": False,
                "visible": visible,
                "hovertemplate": f"%{{y:.4~g}} {unit} at %{{x:.4~g}} s<extra>%{{fullData.name}}, {kind}</extra>",
            }
        )
    kinds = " or ".join(sorted({kind for kind, _, _ in curves.values()}))
    caption = (
        f"The rank with the most memory at each timed step: {kinds}. A line has a gap at steps that an instrument observed. "
        "First completed repeat of each cell."
    )
    figure_layout = layout(
        axis("s since the end of the first timed step", showgrid=False), axis(unit, rangemode="tozero"), showlegend=True
    )
    figure = Figure("memory_by_run", "Memory over time", caption, 380, data, figure_layout)
    return small_multiples.lines(figure, small_multiples.divide_cells(marks))


def _memory_curve(run: LoadedRun) -> tuple[str, list[float], list[int | None]] | None:
    """The memory at each timed step of a run, as (kind of memory, times in seconds, sizes in bytes); None if no line can be
    drawn.

    The size at a step is the size on the rank with the most memory. It is None at steps that an instrument observed.
    """
    column, timed_window = find_memory_column(select_unwatched(run.timed)), find_timed_window(run.timed)
    if column is None or timed_window is None:
        return None
    value = pl.when(~pl.col("watched").any()).then(pl.col(column).max())
    rows = run.timed.group_by("step").agg(pl.max("wall_s") - timed_window[0], value=value).sort("step")
    return KINDS[column], rows["wall_s"].to_list(), rows["value"].to_list()
