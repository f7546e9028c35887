"""Draws figures with one row per cell: throughput, distribution of step times, peak memory, and utilization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from collect.drawing.axes import make_axis, rows_height_px, rows_layout
from collect.drawing.panel_rows import split_rows
from collect.drawing.traces import error_bars, horizontal_bars, scatter_trace, state_trace
from collect.figure import INK, MUTED, CellMark, Figure, WorkloadGroup
from collect.findings.statistics import Estimate
from collect.sources.steps import select_undisturbed
from shardlab.terminal import notation

THROUGHPUT, PEAK_MEMORY = "throughput_per_s", "peak_memory_bytes"
PADDING = 0.03  # share of the x axis that is added at both ends, so that no mark is cut
CUT_NOTE = "Wider intervals are cut at the edge."
MOST_INTERVAL = 1.5  # an interval that exceeds this multiple of the largest mean of all cells is cut at this multiple
QUANTILES = {"lowerfence": 0.05, "q1": 0.25, "median": 0.5, "q3": 0.75, "upperfence": 0.95}
# (metric, its name in the legend, symbol of its marks). The row in which a mark lies shows the cell.
UTILIZATIONS = (
    ("gpu_pct", "GPUs busy", "circle-open"),
    ("gpu_memory_pct", "GPU memory in use, maximum", "square-open"),
    ("cpu_pct", "processors busy", "diamond-open"),
)
LEGEND_PX = 66  # height of the legend of utilization, which has up to three lines on a phone


def draw_throughput(group: WorkloadGroup) -> Figure | None:
    """Draw one mark per cell at its mean throughput, with the interval of the mean, and a mark for ideal scaling."""
    estimates = _measured_cells(group, THROUGHPUT)
    if not estimates:
        return None
    unit = estimates[0][1].unit
    axis_end = _axis_end([estimate for _, estimate in estimates])
    ideals = _ideal_throughputs(group)
    inside, ideals_beyond = [[entry for entry in ideals if (entry[0] > axis_end) is is_beyond] for is_beyond in (False, True)]
    stroke_style = {"symbol": "line-ns", "size": 20, "line": {"color": MUTED, "width": 2}, "color": INK}
    arrow_style = {"symbol": "triangle-right", "size": 9, "color": MUTED}
    data = [
        state_trace(group, lambda mark: THROUGHPUT in mark.row.metrics),
        _ideal_marks("ideal", inside, axis_end, stroke_style, unit),
        _ideal_marks("ideal, beyond the axis", ideals_beyond, axis_end, arrow_style, unit) | {"cliponaxis": False},
        *(_interval_mark(mark, estimate, mark.look.marks(10), f"%{{x:,.4~g}} {unit}") for mark, estimate in estimates),
    ]
    caption = f"Mean over repeats with its 95 % interval. Vertical mark: ideal scaling of {group.baseline} to these ranks."
    if ideals_beyond:
        caption += " Arrow at the edge: ideal scaling lies beyond this axis."
    if any((estimate.high or 0) > axis_end for _, estimate in estimates):
        caption += f" {CUT_NOTE}"
    layout = rows_layout(group, unit)
    layout["xaxis"] = make_axis(unit, range=[-PADDING * axis_end, axis_end], nticks=5, tickangle=0)
    return split_rows(Figure(THROUGHPUT, "Throughput", caption, rows_height_px(group), data, layout), group.marks)


def _measured_cells(group: WorkloadGroup, metric: str) -> list[tuple[CellMark, Estimate]]:
    return [(mark, mark.row.metrics[metric]) for mark in group.marks if metric in mark.row.metrics]


def _axis_end(estimates: Sequence[Estimate]) -> float:
    """The end of the x axis: after the largest mean and its interval. A very wide interval is cut at MOST_INTERVAL."""
    largest = max(estimate.value for estimate in estimates)
    widest = max(estimate.high or estimate.value for estimate in estimates)
    return (1 + PADDING) * min(widest, MOST_INTERVAL * largest) or 1.0


def _ideal_throughputs(group: WorkloadGroup) -> list[tuple[float, str]]:
    """(throughput of the baseline of a cell times the ratio of their numbers of ranks, label of the cell), for each cell that
    has another cell as its baseline."""
    return [
        (baseline.row.metrics[THROUGHPUT].value * mark.row.cell["gpus"] / baseline.row.cell["gpus"], mark.label)
        for mark, baseline in group.pairs_with_baselines
        if THROUGHPUT in baseline.row.metrics
    ]


def _ideal_marks(
    name: str, ideals: Sequence[tuple[float, str]], axis_end: float, marker: dict[str, Any], unit: str
) -> dict[str, Any]:
    """Marks for ideal scaling, at the edge if they lie beyond the axis. ideals: as `_ideal_throughputs` returns them."""
    x, hover = ([min(ideal, axis_end) for ideal, _ in ideals], f"ideal: %{{customdata:,.4~g}} {unit}<extra>%{{y}}</extra>")
    hover_data = {"customdata": [ideal for ideal, _ in ideals], "hovertemplate": hover}
    return scatter_trace("markers", x, [label for _, label in ideals], name=name, marker=marker, **hover_data)


def _interval_mark(mark: CellMark, estimate: Estimate, marker: dict[str, Any], text: str) -> dict[str, Any]:
    """A mark at a mean in the row of its cell, with the interval of the mean. text: where the reader points at the mark."""
    bars, hover = error_bars([estimate], mark.look.colour), f"{text}, n = {estimate.n}<extra>%{{y}}</extra>"
    mark_settings = {"meta": mark.row.id, "error_x": bars, "marker": marker, "hovertemplate": hover}
    return scatter_trace("markers", [estimate.value], [mark.label], **mark_settings)


def draw_step_time(group: WorkloadGroup) -> Figure | None:
    """Draw one box per cell for its timed steps in all completed repeats. The whiskers are the 5th and 95th percentile."""
    data: list[dict[str, Any]] = []
    for mark in group.marks:
        if mark.cell.completed_runs:
            runs = mark.cell.completed_runs
            step_times_ms = pl.concat(select_undisturbed(run.timed_steps, run.world_steps) for run in runs)["step_ms"]
            box_style = {"line": {"color": mark.look.colour, "width": 1.5}, "fillcolor": "rgba(0,0,0,0)", "width": 0.45}
            box = {"type": "box", "orientation": "h", "y": [mark.label], "name": mark.label, "meta": mark.row.id}
            quantiles = {quantile_name: [step_times_ms.quantile(share, "linear")] for quantile_name, share in QUANTILES.items()}
            data.append(box | box_style | quantiles | {"hoverinfo": "x"})
    if not data:
        return None
    data.append(state_trace(group, lambda mark: bool(mark.cell.completed_runs)))
    caption = "The slowest rank in each timed step, all repeats. Box: quartiles and median; whiskers: 5th to 95th percentile."
    return split_rows(
        Figure("step_time", "Step time", caption, rows_height_px(group), data, rows_layout(group, "ms")), group.marks
    )


def draw_peak_memory(group: WorkloadGroup) -> Figure | None:
    """Draw one bar per cell: the peak memory of the rank that needs the most. Its value is written at its end."""
    estimates = _measured_cells(group, PEAK_MEMORY)
    if not estimates:
        return None
    unit, unit_bytes = notation.choose_unit([estimate.value for _, estimate in estimates])
    data = [state_trace(group, lambda mark: PEAK_MEMORY in mark.row.metrics)]
    for mark, estimate in estimates:
        value, hover = estimate.value / unit_bytes, f"%{{x:,.4~g}} {unit}, {estimate.kind}<extra>%{{y}}</extra>"
        bar = horizontal_bars([value], [mark.label], meta=mark.row.id, marker={"color": mark.look.colour}, width=0.45)
        text = {"text": [notation.format_number(value, 3)], "textposition": "outside", "textfont": {"color": INK, "size": 12}}
        data.append(bar | text | {"cliponaxis": False, "hovertemplate": hover})
    kinds = sorted({estimate.kind for _, estimate in estimates})
    caption = f"Highest over ranks and timed steps, mean over repeats: {' or '.join(kinds)}."
    layout = rows_layout(group, unit)
    layout["margin"]["r"] = 56
    return split_rows(Figure(PEAK_MEMORY, "Peak memory", caption, rows_height_px(group), data, layout), group.marks)


def draw_utilization(group: WorkloadGroup) -> Figure | None:
    """Draw one mark with its interval for each cell and each of the three metrics, in percent of the capacity, as in study 3
    (sections 5.1.2, 5.1.3).

    None if no cell has a metric of GPUs: the table and the figure `telemetry` already show the processors.
    """
    measured_entries = [entry for entry in UTILIZATIONS if any(entry[0] in mark.row.metrics for mark in group.marks)]
    names = {metric_name for metric_name, _, _ in measured_entries}
    if names <= {"cpu_pct"}:
        return None
    # The row of a cell that completed, but has no telemetry, stays empty.
    data = [state_trace(group, lambda mark: mark.row.n > 0 or bool(names & mark.row.metrics.keys())) | {"showlegend": False}]
    for metric_name, legend_name, symbol in measured_entries:
        legend_entry = {"name": legend_name, "legendgroup": legend_name}
        marker = {"color": INK, "symbol": symbol, "size": 10, "line": {"width": 2}}
        # the entry of the legend, in no cell's colour
        data.append(scatter_trace("markers", [None], [None], marker=marker, **legend_entry))
        for mark, estimate in _measured_cells(group, metric_name):
            colour = {"color": mark.look.colour, "line": {"width": 2, "color": mark.look.colour}}
            point = _interval_mark(mark, estimate, marker | colour, f"{legend_name}: %{{x:.3~g}} %")
            data.append(point | {"legendgroup": legend_name, "showlegend": False})
    caption = (
        "While steps were timed. GPUs: mean over the GPUs of the run. GPU memory: the highest share of any of these GPUs. "
        "Processors: mean over all processors of the hosts. Means over repeats with their 95 % intervals."
    )
    layout = rows_layout(group, "%") | {"showlegend": True}
    layout["xaxis"] |= {"range": [-2, 102]}
    return split_rows(
        Figure("utilization", "Utilization", caption, rows_height_px(group) + LEGEND_PX, data, layout), group.marks
    )
