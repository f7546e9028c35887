"""Draws figures with one row per cell: throughput, distribution of step times, peak memory, and utilization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from collect.drawing.axes import make_axis, make_rows_layout, sum_rows_px
from collect.drawing.panel_rows import split_rows
from collect.drawing.traces import make_error_bars, make_horizontal_bars, make_points, make_states
from collect.figure import INK, MUTED, CellMark, Figure, WorkloadGroup
from collect.findings.statistics import Estimate
from collect.sources.steps import select_undisturbed_steps
from shardlab.terminal import notation

THROUGHPUT, PEAK_MEMORY = "throughput_per_s", "peak_memory_bytes"
AXIS_PADDING_SHARE = 0.03  # share of the x axis that is added at both ends, so that no mark is cut
CUT_NOTE = "Wider intervals are cut at the edge."
MAX_INTERVAL_MULTIPLE = 1.5  # an interval that exceeds this multiple of the largest mean of all cells is cut at this multiple
QUANTILES = {"lowerfence": 0.05, "q1": 0.25, "median": 0.5, "q3": 0.75, "upperfence": 0.95}
# (metric, its name in the legend, symbol of its marks). The row in which a mark lies shows the cell.
UTILIZATION_METRICS = (
    ("gpu_pct", "GPUs busy", "circle-open"),
    ("gpu_memory_pct", "GPU memory in use, maximum", "square-open"),
    ("cpu_pct", "processors busy", "diamond-open"),
)
LEGEND_PX = 66  # height of the legend of utilization, which has up to three lines on a phone


def draw_throughput(group: WorkloadGroup) -> Figure | None:
    """Draw one mark per cell at its mean throughput, with the interval of the mean, and a mark for ideal scaling."""
    estimates = _select_measured_cells(group, THROUGHPUT)
    if not estimates:
        return None
    unit = estimates[0][1].unit
    axis_end = _compute_axis_end([estimate for _, estimate in estimates])
    ideals = _compute_ideal_throughputs(group)
    inside, ideals_beyond = [[ideal for ideal in ideals if (ideal[0] > axis_end) is is_beyond] for is_beyond in (False, True)]
    stroke_style = {"symbol": "line-ns", "size": 20, "line": {"color": MUTED, "width": 2}, "color": INK}
    arrow_style = {"symbol": "triangle-right", "size": 9, "color": MUTED}
    traces = [
        make_states(group, lambda mark: THROUGHPUT in mark.row.metrics),
        _make_ideal_marks("ideal", inside, axis_end, stroke_style, unit),
        _make_ideal_marks("ideal, beyond the axis", ideals_beyond, axis_end, arrow_style, unit) | {"cliponaxis": False},
        *(_make_interval_mark(mark, estimate, mark.look.marks(10), f"%{{x:,.4~g}} {unit}") for mark, estimate in estimates),
    ]
    caption = f"Mean over repeats with its 95 % interval. Vertical mark: ideal scaling of {group.baseline} to these ranks."
    if ideals_beyond:
        caption += " Arrow at the edge: ideal scaling lies beyond this axis."
    if any((estimate.high or 0) > axis_end for _, estimate in estimates):
        caption += f" {CUT_NOTE}"
    layout = make_rows_layout(group, unit)
    layout["xaxis"] = make_axis(unit, range=[-AXIS_PADDING_SHARE * axis_end, axis_end], nticks=5, tickangle=0)
    return split_rows(Figure(THROUGHPUT, "Throughput", caption, sum_rows_px(group), traces, layout), group.marks)


def _select_measured_cells(group: WorkloadGroup, metric_name: str) -> list[tuple[CellMark, Estimate]]:
    return [(mark, mark.row.metrics[metric_name]) for mark in group.marks if metric_name in mark.row.metrics]


def _compute_axis_end(estimates: Sequence[Estimate]) -> float:
    """The end of the x axis: after the largest mean and its interval. A very wide interval is cut at MOST_INTERVAL."""
    largest_mean = max(estimate.value for estimate in estimates)
    furthest_end = max(estimate.high or estimate.value for estimate in estimates)
    return (1 + AXIS_PADDING_SHARE) * min(furthest_end, MAX_INTERVAL_MULTIPLE * largest_mean) or 1.0


def _compute_ideal_throughputs(group: WorkloadGroup) -> list[tuple[float, str]]:
    """(throughput of the baseline of a cell times the ratio of their numbers of ranks, label of the cell), for each cell that
    has another cell as its baseline."""
    return [
        (baseline.row.metrics[THROUGHPUT].value * mark.row.cell["gpus"] / baseline.row.cell["gpus"], mark.label)
        for mark, baseline in group.pairs_with_baselines
        if THROUGHPUT in baseline.row.metrics
    ]


def _make_ideal_marks(
    legend_name: str, ideals: Sequence[tuple[float, str]], axis_end: float, marker: dict[str, Any], unit: str
) -> dict[str, Any]:
    """Marks for ideal scaling, at the edge if they lie beyond the axis. ideals: as `_compute_ideal_throughputs` returns
    them."""
    x, template = ([min(ideal, axis_end) for ideal, _ in ideals], f"ideal: %{{customdata:,.4~g}} {unit}<extra>%{{y}}</extra>")
    hover_data = {"customdata": [ideal for ideal, _ in ideals], "hovertemplate": template}
    return make_points("markers", x, [label for _, label in ideals], name=legend_name, marker=marker, **hover_data)


def _make_interval_mark(mark: CellMark, estimate: Estimate, marker: dict[str, Any], hover_text: str) -> dict[str, Any]:
    """A mark at a mean in the row of its cell, with the interval of the mean. hover_text: where the reader points at the
    mark."""
    interval_bars, hover = make_error_bars([estimate], mark.look.colour), f"{hover_text}, n = {estimate.n}<extra>%{{y}}</extra>"
    mark_settings = {"meta": mark.row.id, "error_x": interval_bars, "marker": marker, "hovertemplate": hover}
    return make_points("markers", [estimate.value], [mark.label], **mark_settings)


def draw_step_time(group: WorkloadGroup) -> Figure | None:
    """Draw one box per cell for its timed steps in all completed repeats. The whiskers are the 5th and 95th percentile."""
    traces: list[dict[str, Any]] = []
    for mark in group.marks:
        if mark.cell.completed_runs:
            runs = mark.cell.completed_runs
            step_times_ms = pl.concat(select_undisturbed_steps(run.timed_steps, run.world_steps) for run in runs)["step_ms"]
            box_style = {"line": {"color": mark.look.colour, "width": 1.5}, "fillcolor": "rgba(0,0,0,0)", "width": 0.45}
            box_trace = {"type": "box", "orientation": "h", "y": [mark.label], "name": mark.label, "meta": mark.row.id}
            quantiles = {quantile_name: [step_times_ms.quantile(share, "linear")] for quantile_name, share in QUANTILES.items()}
            traces.append(box_trace | box_style | quantiles | {"hoverinfo": "x"})
    if not traces:
        return None
    traces.append(make_states(group, lambda mark: bool(mark.cell.completed_runs)))
    caption = "The slowest rank in each timed step, all repeats. Box: quartiles and median; whiskers: 5th to 95th percentile."
    return split_rows(
        Figure("step_time", "Step time", caption, sum_rows_px(group), traces, make_rows_layout(group, "ms")), group.marks
    )


def draw_peak_memory(group: WorkloadGroup) -> Figure | None:
    """Draw one bar per cell: the peak memory of the rank that needs the most. Its value is written at its end."""
    estimates = _select_measured_cells(group, PEAK_MEMORY)
    if not estimates:
        return None
    unit, unit_bytes = notation.choose_unit([estimate.value for _, estimate in estimates])
    traces = [make_states(group, lambda mark: PEAK_MEMORY in mark.row.metrics)]
    for mark, estimate in estimates:
        value, hover_template = estimate.value / unit_bytes, f"%{{x:,.4~g}} {unit}, {estimate.kind}<extra>%{{y}}</extra>"
        bar = make_horizontal_bars([value], [mark.label], meta=mark.row.id, marker={"color": mark.look.colour}, width=0.45)
        text = {"text": [notation.format_number(value, 3)], "textposition": "outside", "textfont": {"color": INK, "size": 12}}
        traces.append(bar | text | {"cliponaxis": False, "hovertemplate": hover_template})
    memory_kinds = sorted({estimate.kind for _, estimate in estimates})
    caption = f"Highest over ranks and timed steps, mean over repeats: {' or '.join(memory_kinds)}."
    layout = make_rows_layout(group, unit)
    layout["margin"]["r"] = 56
    return split_rows(Figure(PEAK_MEMORY, "Peak memory", caption, sum_rows_px(group), traces, layout), group.marks)


def draw_utilization(group: WorkloadGroup) -> Figure | None:
    """Draw one mark with its interval for each cell and each of the three metrics, in percent of the capacity, as in study 3
    (sections 5.1.2, 5.1.3).

    None if no cell has a metric of GPUs: the table and the figure `telemetry` already show the processors.
    """
    measured_entries = [entry for entry in UTILIZATION_METRICS if any(entry[0] in mark.row.metrics for mark in group.marks)]
    names = {metric_name for metric_name, _, _ in measured_entries}
    if names <= {"cpu_pct"}:
        return None
    # The row of a cell that completed, but has no telemetry, stays empty.
    data = [make_states(group, lambda mark: mark.row.n > 0 or bool(names & mark.row.metrics.keys())) | {"showlegend": False}]
    for metric_name, legend_name, symbol in measured_entries:
        legend_entry = {"name": legend_name, "legendgroup": legend_name}
        marker = {"color": INK, "symbol": symbol, "size": 10, "line": {"width": 2}}
        # the entry of the legend, in no cell's colour
        data.append(make_points("markers", [None], [None], marker=marker, **legend_entry))
        for mark, estimate in _select_measured_cells(group, metric_name):
            colour_style = {"color": mark.look.colour, "line": {"width": 2, "color": mark.look.colour}}
            point = _make_interval_mark(mark, estimate, marker | colour_style, f"{legend_name}: %{{x:.3~g}} %")
            data.append(point | {"legendgroup": legend_name, "showlegend": False})
    caption = (
        "While steps were timed. GPUs: mean over the GPUs of the run. GPU memory: the highest share of any of "
        "these GPUs. Processors: mean over all processors of the hosts. Means over repeats with their 95 % intervals."
    )
    layout = make_rows_layout(group, "%") | {"showlegend": True}
    layout["xaxis"] |= {"range": [-2, 102]}
    return split_rows(Figure("utilization", "Utilization", caption, sum_rows_px(group) + LEGEND_PX, data, layout), group.marks)
