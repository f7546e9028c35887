"""Draws why a step of a cell takes more or less time than a step of its baseline: by parts that sum to the difference."""

from __future__ import annotations

from typing import Any

from collect import notation
from collect.drawing.panel_rows import rows
from collect.drawing.stacked_bars import BAR_PX, GAP_PX, LABEL_PX, LEGEND_PX, MARGIN_PX, bounded, lines
from collect.figure import INK, MUTED, CellMark, Figure, Group, axis
from collect.findings.trace_answers import of_cells
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
    found: list[tuple[CellMark, StepDifference]] = []
    for mark in group.marks:
        against = by_id.get(mark.row.baseline or "")
        if against is not None and against is not mark and (step := of_cells(mark.cell, against.cell)) is not None:
            found.append((mark, step))
    if not found:
        return None
    found, left_out = bounded(found, lambda entry: entry[0])
    summed = [parts(step) for _, step in found]
    cells = {"meta": [mark.row.id for mark, _ in found]}
    drawn = [name for name in COLOURS if any(one.get(name) for one in summed)]
    data = [_bars(name, [one.get(name, 0) for one in summed]) | cells for name in drawn]
    data.append(_totals([step for _, step in found], summed))
    shape = lines([mark.label for mark, _ in found], LABEL_PX, LINE_PX)
    ends = [sum(value for value in one.values() if (value > 0) == up) for one in summed for up in (True, False)]
    low, high = min(0, *ends), max(0, *ends)
    room = ROOM * (high - low)
    x = axis("additional ms per step", range=[low - room, high + room], zeroline=True, nticks=5, tickangle=0)
    shape |= {"barmode": "relative", "xaxis": x | {"zerolinecolor": MUTED}}
    shape["legend"] |= {"traceorder": "normal", "font": {"size": 11}}
    caption = (
        f"A profiled step minus one of the cell's baseline ({group.baseline}), mean over profiled ranks and repeats. Parts "
        "to the right take longer, parts to the left take less time; the number is the whole difference, to which the parts "
        f"sum exactly. Communication counts while nothing computes.{left_out}"
    )
    height_px = MARGIN_PX + LEGEND_PX * len(data) + LINE_PX * len(found)
    return rows(Figure(NAME, "Why a step takes longer", caption, height_px, data, shape), [mark for mark, _ in found])


def parts(step: StepDifference) -> dict[str, float]:
    """Additional milliseconds of a step, compared with the baseline, by legend entry (COLOURS). All collectives are summed."""
    found: dict[str, float] = {}
    for one in step.parts:
        kind, cause = one.part.kind, one.part.cause
        if kind == "communication":
            name = f"communication: {cause}" if cause else "communication, waiting included"
        elif kind == "idle":
            name = f"idle: {cause}" if f"idle: {cause}" in COLOURS else "idle: other"
        else:
            name = "memory operations" if kind == "memory" else kind
        found[name] = found.get(name, 0) + one.difference_ns / 1e6
    return found


def _middle(line: int) -> float:
    return line + (LABEL_PX + BAR_PX / 2) / LINE_PX


def _bars(name: str, values: list[float]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": values,
        "y": [_middle(line) for line in range(len(values))],
        "marker": {"color": COLOURS[name]},
        "width": BAR_PX / LINE_PX,
        "hovertemplate": f"{name}: %{{x:+,.4~g}} ms<extra></extra>",
    }


def _totals(steps: list[StepDifference], summed: list[dict[str, float]]) -> dict[str, Any]:
    """The text to the right of each bar: the whole difference of a step from the baseline, in ms."""
    says = [
        f"  {'+' if step.difference_ns > 0 else '−' if step.difference_ns < 0 else ''}"
        f"{notation.number(abs(step.difference_ns) / 1e6, 3)}"
        for step in steps
    ]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [sum(value for value in one.values() if value > 0) for one in summed],
        "y": [_middle(line) for line in range(len(steps))],
        "text": says,
        "textposition": "middle right",
        "textfont": {"color": INK, "size": 12},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
