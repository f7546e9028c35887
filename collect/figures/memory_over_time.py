"""Draws memory over time: of a run, of the profiled steps, and by category over one step or over several steps."""

from __future__ import annotations

from typing import Any

import polars as pl

from collect.drawing.axes import make_axis, make_layout, make_panel_title, name_axis
from collect.drawing.panels import draw_panels
from collect.drawing.small_multiples import draw_cell_lines
from collect.drawing.traces import compute_max_points, make_points, pick_points, thin_points
from collect.figure import INK, MAX_MARKED, MUTED, SERIES, CellMark, Figure, WorkloadGroup, describe_rest, order_by_visibility
from collect.loading.loaded_run import LoadedRun
from collect.metrics.memory import KIND_BY_MEMORY_COLUMN, find_memory_column
from collect.sources.memory import MemoryCurves
from collect.sources.steps import find_timed_window, select_unwatched_steps
from collect.traces.memory_use import MemoryUse
from shardlab.terminal import notation

PANEL_HEIGHT_PX = 190
PANEL_TITLE_SHARE = 0.2  # share of the height of a panel that its title needs
MOST_PANELS = 6
MOST_POINTS = 300  # the most points of a curve
# Memory category -> colour, in the order in which the areas are stacked: constant categories are at the bottom.
CATEGORIES = {
    "parameter": SERIES[1], "master_parameter": INK, "optimizer_state": SERIES[2], "gradient": SERIES[3], "buffer": SERIES[7],
    "gathered": SERIES[6], "activation": SERIES[4], "temporary": SERIES[5],
    "unknown": MUTED,  # memory that belongs to no category; only recorded at the memory peak of a GPU
}  # fmt: skip


def format_category(category: str) -> str:
    """The words that figures show for a memory category, such as `optimizer state` for `optimizer_state`."""
    return "master copy" if category == "master_parameter" else category.replace("_", " ")


def draw_memory_by_run(group: WorkloadGroup) -> Figure | None:
    """Draw the memory of a rank over the timed steps of one run of each cell: it shows whether memory stays constant or grows.

    The run is the first completed repeat that did not resume from a checkpoint.
    """
    mark_curves = [(mark, _read_memory_curve(mark.unresumed_run)) for mark in group.marks if mark.unresumed_run]
    drawn_curves = [(mark, curve) for mark, curve in mark_curves if curve]
    unit, unit_bytes = notation.choose_unit(
        [value for _, (_, _, sizes) in drawn_curves for value in sizes if value is not None]
    )
    traces = {}
    for mark, (memory_kind, times_s, sizes) in drawn_curves:
        x, y = thin_points(times_s, sizes, compute_max_points(len(drawn_curves)))
        x = [round(time_s, 3) for time_s in x]
        y = [None if value is None else float(f"{value / unit_bytes:.5g}") for value in y]
        marker = mark.look.marks(4) if len(x) <= MAX_MARKED else mark.look.sparse_marks
        template = f"%{{y:.4~g}} {unit} at %{{x:.4~g}} s<extra>%{{fullData.name}}, {memory_kind}</extra>"
        traces[mark.label] = [make_points("lines+markers", x, y, marker=marker, connectgaps=False, hovertemplate=template)]
    kinds = " or ".join(sorted({memory_kind for _, (memory_kind, _, _) in drawn_curves}))
    caption = (
        f"The rank with the most memory at each timed step: {kinds}. A line has a gap at steps that an "
        "instrument observed. First completed repeat of each cell."
    )
    x_axis, y_axis = (make_axis("s since the end of the first timed step", showgrid=False), make_axis(unit, rangemode="tozero"))
    return draw_cell_lines("memory_by_run", "Memory over time", caption, group, traces, x_axis, y_axis)


def _read_memory_curve(run: LoadedRun) -> tuple[str, list[float], list[int | None]] | None:
    """The memory at each timed step of a run, as (kind of memory, times in seconds, sizes in bytes); None if no line can be
    drawn.

    The size at a step is the size on the rank with the most memory. It is None at steps that an instrument observed.
    """
    memory_column, timed_window = (
        find_memory_column(select_unwatched_steps(run.timed_steps)),
        find_timed_window(run.timed_steps),
    )
    if memory_column is None or timed_window is None:
        return None
    size_at_step = pl.when(~pl.col("watched").any()).then(pl.col(memory_column).max())
    step_rows = run.timed_steps.group_by("step").agg(pl.max("wall_s") - timed_window[0], value=size_at_step).sort("step")
    return KIND_BY_MEMORY_COLUMN[memory_column], step_rows["wall_s"].to_list(), step_rows["value"].to_list()


def draw_profiled_memory(group: WorkloadGroup) -> Figure | None:
    """Draw the memory of a device over the profiled steps, from the allocations that the traces record.

    There is one line for each cell whose traces record memory, of one device of its first completed repeat.
    """
    memory_uses = [(mark, use) for mark in group.marks if (use := find_highest_memory_use(mark)) is not None]
    unit, unit_bytes = notation.choose_unit([use.peak_bytes for _, use in memory_uses])
    traces_by_label = {}
    for mark, use in memory_uses:
        peak_text = f"{notation.format_number(use.peak_bytes / unit_bytes)} {unit}"
        if use.peak_reserved_bytes is not None:
            peak_text += f", {notation.format_number(use.peak_reserved_bytes / unit_bytes)} {unit} reserved"
        hover_template = f"{use.device}: %{{y:,.4~g}} {unit} at %{{x:,.4~g}} ms<br>peak: {peak_text}<extra>{mark.label}</extra>"
        x_values, y_values = [point.at_ns / 1e6 for point in use.points], [point.allocated / unit_bytes for point in use.points]
        line_style = mark.look.line | {"shape": "hv", "width": 1.5}
        traces_by_label[mark.label] = [make_points("lines", x_values, y_values, line=line_style, hovertemplate=hover_template)]
    caption = (
        "Memory that PyTorch's allocator had allocated, in the profiled steps of the first completed repeat, on "
        "the device with the highest peak. Each point is the highest of its part of the curve. On a GPU: of all "
        "tensors; on a CPU: what was allocated since the recording began."
    )
    x_axis, y_axis = (make_axis("ms since the first profiled step began", showgrid=False), make_axis(unit, rangemode="tozero"))
    return draw_cell_lines("profiled_memory", "Memory of the profiled steps", caption, group, traces_by_label, x_axis, y_axis)


def find_highest_memory_use(mark: CellMark) -> MemoryUse | None:
    """The memory of the device with the highest peak in the first completed repeat of a cell; None if its traces record no
    memory.

    A CPU is only chosen if the traces record the memory of no GPU.
    """
    runs = mark.cell.completed_runs[:1]
    memory_uses = [use for run in runs for rank in run.traces.analyses if rank.steps for use in rank.memory]
    memory_uses = [use for use in memory_uses if use.device != "cpu"] or memory_uses
    return max(memory_uses, key=lambda use: use.peak_bytes, default=None)


def _list_observed_cells(group: WorkloadGroup) -> list[tuple[CellMark, MemoryCurves]]:
    """The cells whose first completed repeat recorded the memory of rank 0 by category, and this memory."""
    return [(mark, mark.first_run.memory) for mark in group.marks if mark.first_run and mark.first_run.memory]


def draw_categories_of_steps(group: WorkloadGroup) -> Figure | None:
    """Draw the memory of each category over several steps, with a panel per category and a line per cell, as figures 12 to 14
    of study 5. A cell has a line if its first completed repeat recorded the memory of rank 0 over more than one step."""
    curves_by_label = {mark.label: curves for mark, curves in _list_observed_cells(group) if curves.steps > 1}
    categories = [part for part in CATEGORIES if any(any(curves.points.get(part, ())) for curves in curves_by_label.values())]
    if not categories:
        return None
    unit, scale = notation.choose_unit(
        [max(values) for curves in curves_by_label.values() for values in curves.points.values()]
    )
    panels, max_points = [], compute_max_points(len(categories) * len(curves_by_label))
    for part in categories:
        trace_by_label = {}
        for label, curves in curves_by_label.items():
            sizes_bytes = curves.points.get(part, [0] * len(curves.t_ms))
            x_values, y = thin_points([t_ms / 1000 for t_ms in curves.t_ms], sizes_bytes, max_points)
            x_values = [float(f"{time_s:.5g}") for time_s in x_values]
            y = [None if size_bytes is None else float(f"{size_bytes / scale:.4g}") for size_bytes in y]
            trace_by_label[label] = make_points("lines", x_values, y, hovertemplate=f"%{{y:.4~g}} {unit} at %{{x:.4~g}} s")
        panels.append((f"{format_category(part).capitalize()} ({unit})", trace_by_label))
    visible_marks = order_by_visibility([mark for mark in group.marks if mark.label in curves_by_label])
    style_of_line = {
        mark.label: {"name": mark.label, "meta": mark.row.id, "visible": visible}
        | {"line": mark.look.line | {"width": 1.5, "shape": "hv"}}
        for mark, visible in visible_marks
    }
    steps_text = " or ".join(str(steps_text) for steps_text in sorted({curves.steps for curves in curves_by_label.values()}))
    caption = (
        f"{steps_text} consecutive steps on rank 0, recorded by the instrument `memory: categories` with "
        "`memory_steps`. First completed repeat of each cell. The time between steps is in the curves, and following "
        "the memory slows steps down."
    )
    time_title = "s since the first of these steps began"
    return draw_panels("memory_of_categories", "Memory of each category over steps", caption, panels, style_of_line, time_title)


def draw_memory_timeline(group: WorkloadGroup) -> Figure | None:
    """Draw the memory over one step by category, one panel per cell, as in studies 2 and 5: the first MOST_PANELS cells whose
    first completed repeat recorded the memory of rank 0 by category."""
    observed_cells = _list_observed_cells(group)
    drawn_cells = observed_cells[:MOST_PANELS]
    if not drawn_cells:
        return None
    unit, unit_bytes = notation.choose_unit([max(map(sum, zip(*curves.points.values()))) for _, curves in drawn_cells])
    layout = make_layout({}, {}, showlegend=True)
    layout["annotations"] = []
    traces: list[dict[str, Any]] = []
    legend_names: set[str] = set()
    for panel_number, (mark, curves) in enumerate(drawn_cells, 1):
        x, y_name = name_axis("x", panel_number), name_axis("y", panel_number)
        top, bottom = 1 - (panel_number - 1 + PANEL_TITLE_SHARE) / len(drawn_cells), 1 - panel_number / len(drawn_cells) + 0.02
        time_title = "ms since the first of these steps began" if panel_number == len(drawn_cells) else ""
        layout[name_axis("xaxis", panel_number)] = make_axis(time_title, anchor=y_name, showgrid=False)
        layout[name_axis("yaxis", panel_number)] = make_axis(unit, domain=[bottom, top], rangemode="tozero", nticks=4, anchor=x)
        layout["annotations"].append(make_panel_title(mark.label, top))
        axis_settings = {"xaxis": x, "yaxis": y_name, "stackgroup": f"panel-{panel_number}", "meta": mark.row.id}
        area_traces = _make_area_traces(curves, unit_bytes, unit)
        traces += [area | axis_settings | {"showlegend": area["name"] not in legend_names} for area in area_traces]
        legend_names |= {area["name"] for area in area_traces}
    step_counts = sorted({curves.steps for _, curves in drawn_cells})
    steps_text = "One step" if step_counts == [1] else f"{' or '.join(map(str, step_counts))} consecutive steps"
    caption = f"{steps_text} on rank 0, recorded by the instrument `memory: categories`. The areas are stacked."
    caption += describe_rest(len(observed_cells) - len(drawn_cells))
    return Figure("memory_timeline", "Memory over a step", caption, 92 + PANEL_HEIGHT_PX * len(drawn_cells), traces, layout)


def _make_area_traces(curves: MemoryCurves, unit_bytes: float, unit: str) -> list[dict[str, Any]]:
    point_indexes = pick_points([sum(sizes) for sizes in zip(*curves.points.values(), strict=True)], MOST_POINTS)
    x = [float(f"{curves.t_ms[index]:.5g}") for index in point_indexes]
    hover = f"%{{y:.4~g}} {unit} at %{{x:.4~g}} ms"
    areas = []
    for part, colour in CATEGORIES.items():
        if part in curves.points:
            y = [float(f"{curves.points[part][index] / unit_bytes:.4g}") for index in point_indexes]
            look = {"line": {"width": 0.5, "color": colour, "shape": "hv"}, "fillcolor": colour}
            areas.append(make_points("lines", x, y, name=format_category(part), legendgroup=part, **look, hovertemplate=hover))
    return areas
