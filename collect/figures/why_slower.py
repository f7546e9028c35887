"""Draws why a step of a cell takes more or less time than a step of its baseline: by parts that sum to the difference."""

from __future__ import annotations

from typing import Any

from collect import notation
from collect.drawing.panel_rows import rows
from collect.drawing.stacked_bars import BAR_PX, GAP_PX, LABEL_PX, LEGEND_PX, MARGIN_PX, labelled_rows_layout, limit_entries
from collect.figure import INK, MUTED, CellMark, Figure, Group, axis
from collect.findings.trace_answers import step_difference
from collect.traces.difference import StepDifference

NAME = "why_slower"
LINE_PX = LABEL_PX + BAR_PX + GAP_PX
COLOURS = {
    "compute": "var(--series-1)",
    "communication: transfer": "var(--series-2)",
    "communication: waiting for slow ranks": "var(--series-4)",
    "communication, waiting included": "var(--series-6)",
    "memory operations": "var(--series-5)",
    "idle: host": "var(--series-3)",
    "idle: communication": "var(--series-7)",
    "idle: other": "var(--line)",
}
ROOM = 0.16  # share of the x axis that is left free on each side for the numbers beside the bars


def draw(group: Group) -> Figure | None:
    """Draw one bar for each cell that was profiled in the same way as its baseline.

    Parts of a step that take longer than in the baseline extend to the right, parts that take less time extend to the left.
    """
    by_id = {mark.row.id: mark for mark in group.marks}
    mark_steps: list[tuple[CellMark, StepDifference]] = []
    for mark in group.marks:
        baseline = by_id.get(mark.row.baseline or "")
        if baseline is not None and baseline is not mark and (step := step_difference(mark.cell, baseline.cell)) is not None:
            mark_steps.append((mark, step))
    if not mark_steps:
        return None
    mark_steps, left_out_note = limit_entries(mark_steps, lambda entry: entry[0])
    cells = [difference_parts(step) for _, step in mark_steps]
    cell_ids = {"meta": [mark.row.id for mark, _ in mark_steps]}
    drawn_parts = [name for name in COLOURS if any(parts.get(name) for parts in cells)]
    data = [_part_trace(name, [parts.get(name, 0) for parts in cells]) | cell_ids for name in drawn_parts]
    data.append(_total_trace([step for _, step in mark_steps], cells))
    frame = labelled_rows_layout([mark.label for mark, _ in mark_steps], LABEL_PX, LINE_PX)
    totals = [
        sum(value for value in parts.values() if (value > 0) == positive) for parts in cells for positive in (True, False)
    ]
    low, high = min(0, *totals), max(0, *totals)
    room = ROOM * (high - low)
    x = axis("additional ms per step", range=[low - room, high + room], zeroline=True, nticks=5, tickangle=0)
    frame |= {"barmode": "relative", "xaxis": x | {"zerolinecolor": MUTED}}
    frame["legend"] |= {"traceorder": "normal", "font": {"size": 11}}
    caption = (
        f"A profiled step minus one of the cell's baseline ({group.baseline}), mean over profiled ranks and repeats. Parts "
        "to the right take longer, parts to the left take less time; the number is the whole difference, to which the parts "
        f"sum exactly. Communication counts while nothing computes.{left_out_note}"
    )
    height_px = MARGIN_PX + LEGEND_PX * len(data) + LINE_PX * len(mark_steps)
    return rows(Figure(NAME, "Why a step takes longer", caption, height_px, data, frame), [mark for mark, _ in mark_steps])


def difference_parts(step: StepDifference) -> dict[str, float]:
    """Additional milliseconds of a step, compared with the baseline, by legend entry (COLOURS). All collectives are summed."""
    ms_by_part: dict[str, float] = {}
    for part_difference in step.parts:
        kind, cause = part_difference.part.kind, part_difference.part.cause
        if kind == "communication":
            name = f"communication: {cause}" if cause else "communication, waiting included"
        elif kind == "idle":
            name = f"idle: {cause}" if f"idle: {cause}" in COLOURS else "idle: other"
        else:
            name = "memory operations" if kind == "memory" else kind
        ms_by_part[name] = ms_by_part.get(name, 0) + part_difference.difference_ns / 1e6
    return ms_by_part


def _bar_middle(row: int) -> float:
    return row + (LABEL_PX + BAR_PX / 2) / LINE_PX


def _part_trace(name: str, values: list[float]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": values,
        "y": [_bar_middle(row) for row in range(len(values))],
        "marker": {"color": COLOURS[name]},
        "width": BAR_PX / LINE_PX,
        "hovertemplate": f"{name}: %{{x:+,.4~g}} ms<extra></extra>",
    }


def _total_trace(steps: list[StepDifference], parts_by_cell: list[dict[str, float]]) -> dict[str, Any]:
    """The text to the right of each bar: the whole difference of a step from the baseline, in ms."""
    texts = [
        f"  {'+' if step.difference_ns > 0 else '−' if step.difference_ns < 0 else ''}"
        f"{notation.format_number(abs(step.difference_ns) / 1e6, 3)}"
        for step in steps
    ]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [sum(value for value in cell_parts.values() if value > 0) for cell_parts in parts_by_cell],
        "y": [_bar_middle(row) for row in range(len(steps))],
        "text": texts,
        "textposition": "middle right",
        "textfont": {"color": INK, "size": 12},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
