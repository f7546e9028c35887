"""Draws throughput and peak memory over the batch size, up to the size that runs out of memory (table 4.1.1 of study 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect import notation
from collect.drawing import small_multiples
from collect.drawing.series import group_alike, line_labels, line_variants
from collect.figure import MOST_SHOWN, MUTED, CellMark, Figure, Group, axis, layout, thin_ticks
from collect.strategy_style import Look, variant_looks

THROUGHPUT, MEMORY = "throughput_per_s", "peak_memory_bytes"
BATCH = ("global_batch_size", "micro_batch_size")


def draw(group: Group) -> Figure | None:
    """Draw one line for each set of cells that differ only in their batch size.

    A set needs a measured throughput at two or more batch sizes; otherwise it has no line.
    """
    lines = [
        sorted(marks, key=lambda mark: mark.cell.cell.global_batch_size)
        # `gradient_accumulation_steps` is not in BATCH, so cells with different numbers of passes per step have separate lines.
        for marks in group_alike(group.marks, BATCH)
        if len({mark.cell.cell.global_batch_size for mark in marks if THROUGHPUT in mark.row.metrics}) > 1
    ]
    if not lines:
        return None
    line_marks = [mark for marks in lines for mark in marks]
    unit = next(mark.row.metrics[THROUGHPUT].unit for mark in line_marks if THROUGHPUT in mark.row.metrics)
    memory_sizes = [mark.row.metrics[MEMORY].value for mark in line_marks if MEMORY in mark.row.metrics]
    memory, size = notation.bytes_unit(memory_sizes)
    looks = variant_looks([marks[0].strategy for marks in lines])
    data: list[dict[str, Any]] = []
    first_marks = [marks[0] for marks in lines]
    labelled_marks: list[tuple[CellMark, dict[str, Any]]] = [(mark, {}) for mark in first_marks]
    names = line_labels(labelled_marks, BATCH)
    panels = small_multiples.divide_lines(first_marks, names, line_variants(labelled_marks, BATCH))
    for index, (name, marks) in enumerate(zip(names, lines, strict=True)):
        visible = True if index < MOST_SHOWN else "legendonly"
        shared = {"name": name, "legendgroup": name, "visible": visible}
        data.append(shared | _metric_line(marks, looks[index], THROUGHPUT, 1, unit) | {"yaxis": "y"})
        data.append(shared | _metric_line(marks, looks[index], MEMORY, size, memory) | {"yaxis": "y2", "showlegend": False})
        if panels:  # the states of cells stand in the panel of their line
            data.append(_state_texts(marks) | {"legendgroup": name})
    data += [] if panels else [_state_texts(line_marks)]
    batches = sorted({mark.cell.cell.global_batch_size for mark in line_marks})
    x = axis("global batch size, log scale", type="log", tickvals=batches, ticktext=list(map(str, batches)), showgrid=False)
    upper = axis(unit, rangemode="tozero", domain=[0.54, 1], nticks=5)
    lower = axis(f"peak memory, {memory}", rangemode="tozero", domain=[0, 0.46], nticks=5)
    figure_layout = layout(thin_ticks(x) | {"anchor": "y2"}, upper, yaxis2=lower, showlegend=True)
    caption = (
        "Means over repeats. The cells of a line differ only in their batch size. A cell without a number shows its state "
        "instead of a mark."
    )
    return small_multiples.lines(Figure("batch_scaling", "Batch sizes", caption, 520, data, figure_layout), panels)


def _metric_line(marks: Sequence[CellMark], look: Look, metric: str, size: float, unit: str) -> dict[str, Any]:
    """A line through the means of one metric of these cells, with the interval of each mean. Cells without the metric are left
    out.

    size: how many units of the metric make one unit of the axis, such as 2^30 for bytes that are drawn in GiB.
    """
    known_estimates = [(mark, estimate) for mark in marks if (estimate := mark.row.metrics.get(metric))]
    above = [None if estimate.high is None else (estimate.high - estimate.value) / size for _, estimate in known_estimates]
    below = [None if estimate.low is None else (estimate.value - estimate.low) / size for _, estimate in known_estimates]
    error_bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.5, "width": 4}
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [mark.cell.cell.global_batch_size for mark, _ in known_estimates],
        "meta": [mark.row.id for mark, _ in known_estimates],
        "y": [estimate.value / size for _, estimate in known_estimates],
        "error_y": error_bars | {"color": look.colour},
        "line": look.line,
        "marker": look.marks(8),
        "hovertemplate": f"%{{y:,.4~g}} {unit} at a batch of %{{x}}",
    }


def _state_texts(marks: Sequence[CellMark]) -> dict[str, Any]:
    """The states, such as `oom`, of the cells that have no throughput, as text at their batch size."""
    states: dict[int, list[str]] = {}
    for mark in marks:
        if THROUGHPUT not in mark.row.metrics:
            states.setdefault(mark.cell.cell.global_batch_size, []).append(mark.row.state)
    return {
        "type": "scatter",
        "mode": "text",
        "x": list(states),
        "y": [0] * len(states),
        "text": ["<br>".join(dict.fromkeys(cell_states)) for cell_states in states.values()],
        "textposition": "top center",
        "textfont": {"color": MUTED, "size": 12},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
