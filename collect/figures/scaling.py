"""Draws lines that connect cells: over the number of ranks, over the batch size, and over the interval of pulls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from collect.drawing.axes import make_axis, make_layout, name_axis, thin_ticks
from collect.drawing.small_multiples import LINES_PX, divide_lines, split_lines
from collect.drawing.traces import make_error_bars, make_points
from collect.figure import MOST_SHOWN, MUTED, CellMark, Figure, WorkloadGroup, escape
from collect.findings import columns
from collect.findings.row import CellRow
from collect.findings.statistics import Estimate
from collect.strategy_style import Look, choose_looks
from shardlab.matrix.cell import Cell, Role, find_role_keys
from shardlab.terminal import notation

SPEED_UP, THROUGHPUT, MEMORY = "speed_up", "throughput_per_s", "peak_memory_bytes"
# Keys in which the cells of a line may differ: the number of ranks, and keys that depend on it or say how ranks share a batch.
SIZES = ("gpus", "nnodes", "dp", "tp", "pp", "servers", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
BATCH_KEYS = ("global_batch_size", "micro_batch_size")
PULL_KEY = "options.pull_interval"
TITLE_BY_PULL_METRIC = {  # metric -> the title of its panel without the unit, from top to bottom
    "final_accuracy_pct": "accuracy",
    "staleness_mean": "staleness",
    "train_time_s": "training time",
    "sent_counted_bytes": "sent per step",
}
PANEL_PX, MARGIN_PX, PANEL_GAP = 130, 90, 0.16  # of PULL_PANELS. GAP: share of the height of a panel between it and the next


def draw_scaling(group: WorkloadGroup) -> Figure | None:
    """Draw the speed-up over the number of ranks: one line for each set of cells that differ only in their ranks.

    The cells of a line have the same global batch size (strong scaling) or the same batch size per rank (weak scaling). None if
    no line would have more than one point.
    """
    lines_by_key = _group_lines([mark for mark in group.marks if SPEED_UP in mark.row.metrics], group.baseline)
    if not any(_count_distinct_ranks(marks) > 1 for marks in lines_by_key.values()):
        return None
    # Besides the keys of a cell, the name of a line shows the batch size that is constant, and no number of ranks.
    labelled_marks = [(marks[0], {"gpus": 0, "batch": batch_text}) for (_, batch_text), marks in lines_by_key.items()]
    line_names = [line_name.replace(" ×0", "", 1) for line_name in _make_line_labels(labelled_marks, SIZES)]
    line_looks = choose_looks([mark.strategy_number for mark, _ in labelled_marks])
    traces: list[dict[str, Any]] = []
    for index, (line_name, ((_, batch_text), marks)) in enumerate(zip(line_names, lines_by_key.items(), strict=True)):
        rank_numbers, y = [mark.cell.cell.gpus for mark in marks], [mark.row.metrics[SPEED_UP].value for mark in marks]
        hover_text = f"%{{y:.3~g}}x on %{{x}} ranks, {batch_text}"
        line_style = {"line": line_looks[index].line, "marker": line_looks[index].marks(8), "hovertemplate": hover_text}
        visible, cells = True if index < MOST_SHOWN else "legendonly", [mark.row.id for mark in marks]
        traces.append(make_points("lines+markers", rank_numbers, y, name=line_name, meta=cells, visible=visible, **line_style))
    rank_counts = sorted({mark.cell.cell.gpus for marks in lines_by_key.values() for mark in marks})
    traces += _make_ideal_line(group, rank_counts)
    x_axis = make_axis("ranks", tickvals=sorted({*rank_counts, *traces[-1]["x"]}), showgrid=False)
    y_axis = make_axis(f"speed-up relative to {group.baseline} (x)", rangemode="tozero")
    caption = "Ratio of mean throughputs. Dotted: ideal scaling, in proportion to the ranks."
    figure = Figure(SPEED_UP, "Scaling", caption, LINES_PX, traces, make_layout(x_axis, y_axis, showlegend=True))
    return split_lines(
        figure, divide_lines([mark for mark, _ in labelled_marks], line_names, _name_line_variants(labelled_marks, SIZES))
    )


def _group_lines(marks: Sequence[CellMark], baseline: str) -> dict[tuple[int, str], list[CellMark]]:
    """The lines of the figure: {key of a line: cells of the line}.

    A key is (number of the set of cells that differ only in their ranks, text about the batch size that all cells of the line
    share, such as `batch 32 per rank`).

    A cell with as many ranks as its baseline is on lines of both kinds of scaling, strong and weak. A cell that is on no line
    is added at the end as a single point, unless it is a cell of the baseline strategy.
    """
    ranks_by_cell = {mark.row.id: mark.cell.cell.gpus for mark in marks}
    marks_by_line: dict[tuple[int, str], list[CellMark]] = {}
    for group_number, alike_marks in enumerate(_group_similar_cells(marks, SIZES)):
        for mark in sorted(_select_trained(alike_marks), key=lambda mark: mark.cell.cell.gpus):
            cell, scaling_kind = mark.cell.cell.require_training(), mark.row.metrics[SPEED_UP].kind
            is_on_both_lines = ranks_by_cell.get(mark.row.baseline or "") == cell.gpus
            if is_on_both_lines or scaling_kind == "strong":
                marks_by_line.setdefault((group_number, f"batch {cell.global_batch_size}"), []).append(mark)
            if is_on_both_lines or scaling_kind == "weak":
                marks_by_line.setdefault((group_number, f"batch {cell.gpu_batch_size} per rank"), []).append(mark)
    varied_lines = {line_key: line for line_key, line in marks_by_line.items() if _count_distinct_ranks(line) > 1}
    drawn_ids = {mark.row.id for line in varied_lines.values() for mark in line}
    for line_key, line in marks_by_line.items():
        if line[0].row.id not in drawn_ids and line[0].cell.cell.strategy != baseline:
            varied_lines[line_key] = line
            drawn_ids |= {mark.row.id for mark in line}
    return varied_lines


def _count_distinct_ranks(line_marks: Sequence[CellMark]) -> int:
    return len({mark.cell.cell.gpus for mark in line_marks})


def _make_ideal_line(group: WorkloadGroup, rank_counts: list[int]) -> list[dict[str, Any]]:
    """The line of ideal scaling, in proportion to the number of ranks, with speed-up 1 at the smallest number of ranks of a
    baseline.

    Empty if the group has no baseline cell.
    """
    baselines = {mark.row.baseline for mark in group.marks}
    baseline_ranks = [mark.cell.cell.gpus for mark in group.marks if mark.row.id in baselines]
    if not baseline_ranks:
        return []
    end_ranks = [min(rank_counts[0], *baseline_ranks), rank_counts[-1]]
    line_style = {"color": MUTED, "width": 1.5, "dash": "dot"}
    speed_ups = [rank_count / min(baseline_ranks) for rank_count in end_ranks]
    return [make_points("lines", end_ranks, speed_ups, name="ideal", line=line_style, hoverinfo="skip")]


def draw_batch_sizes(group: WorkloadGroup) -> Figure | None:
    """Draw throughput and peak memory over the batch size, up to the size that runs out of memory (table 4.1.1 of study 2): one
    line for each set of cells that differ only in their batch size.

    A set needs a measured throughput at two or more batch sizes; otherwise it has no line.
    """
    marks_by_line = [
        sorted(marks, key=_get_batch_size)
        # `gradient_accumulation_steps` is not in BATCH, so cells with different numbers of passes per step have separate lines.
        for marks in _group_similar_cells(_select_trained(group.marks), BATCH_KEYS)
        if len({_get_batch_size(mark) for mark in marks if THROUGHPUT in mark.row.metrics}) > 1
    ]
    if not marks_by_line:
        return None
    line_marks = [mark for marks in marks_by_line for mark in marks]
    unit = next(mark.row.metrics[THROUGHPUT].unit for mark in line_marks if THROUGHPUT in mark.row.metrics)
    memory_sizes_bytes = [mark.row.metrics[MEMORY].value for mark in line_marks if MEMORY in mark.row.metrics]
    memory_unit, unit_bytes = notation.choose_unit(memory_sizes_bytes)
    labelled_marks: list[tuple[CellMark, dict[str, Any]]] = [(marks[0], {}) for marks in marks_by_line]
    line_looks = choose_looks([mark.strategy_number for mark, _ in labelled_marks])
    line_names = _make_line_labels(labelled_marks, BATCH_KEYS)
    panels = divide_lines([mark for mark, _ in labelled_marks], line_names, _name_line_variants(labelled_marks, BATCH_KEYS))
    traces: list[dict[str, Any]] = []
    for index, (line_name, marks) in enumerate(zip(line_names, marks_by_line, strict=True)):
        line_style = {"name": line_name, "legendgroup": line_name, "visible": True if index < MOST_SHOWN else "legendonly"}
        for metric, y_name, metric_size, metric_unit in ((THROUGHPUT, "y", 1.0, unit), (MEMORY, "y2", unit_bytes, memory_unit)):
            template = f"%{{y:,.4~g}} {metric_unit} at a batch of %{{x}}"
            metric_line = _make_metric_line(marks, line_looks[index], _get_batch_size, metric, metric_size)
            traces.append(line_style | metric_line | {"yaxis": y_name, "showlegend": y_name == "y", "hovertemplate": template})
        if panels:  # the states of cells stand in the panel of their line
            traces.append(_make_state_texts(marks) | {"legendgroup": line_name})
    traces += [] if panels else [_make_state_texts(line_marks)]
    batch_sizes = sorted({_get_batch_size(mark) for mark in line_marks})
    x_axis = make_axis(
        "global batch size, log scale", type="log", tickvals=batch_sizes, ticktext=list(map(str, batch_sizes)), showgrid=False
    )
    throughput_axis = make_axis(unit, rangemode="tozero", domain=[0.54, 1], nticks=5)
    memory_axis = make_axis(f"peak memory, {memory_unit}", rangemode="tozero", domain=[0, 0.46], nticks=5)
    layout = make_layout(thin_ticks(x_axis) | {"anchor": "y2"}, throughput_axis, yaxis2=memory_axis, showlegend=True)
    caption = (
        "Means over repeats. The cells of a line differ only in their batch size. A cell without a number shows "
        "its state instead of a mark."
    )
    return split_lines(Figure("batch_scaling", "Batch sizes", caption, 520, traces, layout), panels)


def _select_trained(marks: Sequence[CellMark]) -> list[CellMark]:
    """The marks of cells that shardlab trains: the batch size of no other cell is known."""
    return [mark for mark in marks if isinstance(mark.cell.cell, Cell)]


def _get_batch_size(mark: CellMark) -> int:
    return mark.cell.cell.require_training().global_batch_size


def _make_metric_line(
    marks: Sequence[CellMark], look: Look, get_x: Callable[[CellMark], int], metric_name: str, unit_size: float
) -> dict[str, Any]:
    """A line through the means of one metric of these cells, with the interval of each mean. Cells without the metric are left
    out.

    get_x: gives the place of a cell on the x axis. unit_size: how many units of the metric make one unit of the y axis.
    """
    measured_marks = [(mark, mark.row.metrics[metric_name]) for mark in marks if metric_name in mark.row.metrics]
    x_values, y = [get_x(mark) for mark, _ in measured_marks], [estimate.value / unit_size for _, estimate in measured_marks]
    interval_bars = make_error_bars([estimate for _, estimate in measured_marks], look.colour, unit_size)
    cell_ids = [mark.row.id for mark, _ in measured_marks]
    return make_points("lines+markers", x_values, y, meta=cell_ids, error_y=interval_bars, line=look.line, marker=look.marks(8))


def _make_state_texts(marks: Sequence[CellMark]) -> dict[str, Any]:
    """The states, such as `oom`, of the cells that have no throughput, as text at their batch size."""
    states: dict[int, list[str]] = {}
    for mark in marks:
        if THROUGHPUT not in mark.row.metrics:
            states.setdefault(_get_batch_size(mark), []).append(mark.row.state)
    texts = ["<br>".join(dict.fromkeys(cell_states)) for cell_states in states.values()]
    text_style = {"textposition": "top center", "textfont": {"color": MUTED, "size": 12}, "cliponaxis": False}
    return make_points("text", list(states), [0] * len(states), text=texts, hoverinfo="skip", showlegend=False, **text_style)


def draw_pull_interval(group: WorkloadGroup) -> Figure | None:
    """Draw accuracy, staleness, training time and sent bytes over the interval at which workers pull parameters (section 5.3 of
    study 3: more frequent communication): one line for each set of cells that differ only in the interval.

    None if no set has two intervals that ran.
    """
    marks_by_line = [
        sorted(marks, key=_get_pull_interval)
        for marks in _group_similar_cells([mark for mark in group.marks if PULL_KEY in mark.row.flat_cell], (PULL_KEY,))
        if len({_get_pull_interval(mark) for mark in marks if mark.row.n}) > 1
    ]
    line_marks = [mark for marks in marks_by_line for mark in marks]
    rows = [metric for metric in TITLE_BY_PULL_METRIC if any(metric in mark.row.metrics for mark in line_marks)]
    if not rows:
        return None
    looks = choose_looks([marks[0].strategy_number for marks in marks_by_line])
    line_names = _make_line_labels([(marks[0], {}) for marks in marks_by_line], (PULL_KEY,))
    data: list[dict[str, Any]] = []
    axis_by_name: dict[str, Any] = {}
    for panel_number, metric in enumerate(rows, 1):
        unit, unit_size = _choose_metric_unit([mark.row.metrics[metric] for mark in line_marks if metric in mark.row.metrics])
        domain = [1 - (panel_number - PANEL_GAP) / len(rows), 1 - (panel_number - 1) / len(rows)]
        panel_title = f"{TITLE_BY_PULL_METRIC[metric]}, {unit}"
        axis_by_name[name_axis("yaxis", panel_number)] = make_axis(panel_title, rangemode="tozero", nticks=4, domain=domain)
        for index, (line_name, marks) in enumerate(zip(line_names, marks_by_line, strict=True)):
            style = {"name": line_name, "legendgroup": line_name, "visible": True if index < MOST_SHOWN else "legendonly"}
            style |= {"yaxis": name_axis("y", panel_number), "showlegend": panel_number == 1}
            hover = f"%{{y:,.4~g}} {unit}, a pull in %{{x}} pushes"
            data.append(
                _make_metric_line(marks, looks[index], _get_pull_interval, metric, unit_size) | style | {"hovertemplate": hover}
            )
    intervals = sorted({_get_pull_interval(mark) for mark in line_marks})
    x = make_axis("pushes between two pulls, log scale", type="log", tickvals=intervals, ticktext=list(map(str, intervals)))
    layout = make_layout(
        x | {"anchor": name_axis("y", len(rows)), "showgrid": False}, axis_by_name.pop("yaxis"), **axis_by_name, showlegend=True
    )
    caption = (
        "A worker pulls parameters once in this many pushes, so the left end is the most frequent "
        "communication. Means over repeats. The cells of a line differ only in the interval. Accuracy: of the "
        "parameters that servers have at the end."
    )
    return Figure("pull_interval", "How often workers pull parameters", caption, MARGIN_PX + PANEL_PX * len(rows), data, layout)


def _get_pull_interval(mark: CellMark) -> int:
    interval: int = mark.row.flat_cell[PULL_KEY]
    return interval


def _choose_metric_unit(estimates: Sequence[Estimate]) -> tuple[str, float]:
    """(the unit of a panel, how many units of the metric make one unit of the panel)."""
    if estimates[0].unit == "bytes":
        return notation.choose_unit([estimate.value for estimate in estimates])
    return estimates[0].unit, 1.0


def _group_similar_cells(marks: Sequence[CellMark], ignored_keys: Collection[str]) -> list[list[CellMark]]:
    """Group cells that differ only in the keys `ignored_keys`. Groups and cells keep the order of `marks`."""
    marks_by_key: dict[bytes, list[CellMark]] = {}
    for mark in marks:
        remaining_keys = _drop_keys(msgspec.to_builtins(mark.cell.cell), ignored_keys)
        marks_by_key.setdefault(msgspec.json.encode(remaining_keys, order="sorted"), []).append(mark)
    return list(marks_by_key.values())


def _make_line_labels(labelled_marks: Sequence[tuple[CellMark, Mapping[str, Any]]], ignored_keys: Collection[str]) -> list[str]:
    """A unique label for each line, HTML-escaped.

    labelled_marks: for each line, one of its cells, and additional keys with values that its label shows. ignored_keys: keys of
    the cell that no label shows."""
    return [escape(label) for label in columns.make_row_labels(_make_label_rows(labelled_marks, ignored_keys))]


def _name_line_variants(lines: Sequence[tuple[CellMark, Mapping[str, Any]]], ignored_keys: Collection[str]) -> list[str]:
    """For each line a name, HTML-escaped, that tells it apart from the lines of its strategy. lines, ignored_keys: as in
    `_make_line_labels`."""
    return [escape(name) for name in columns.name_row_variants(_make_label_rows(lines, ignored_keys), "strategy")]


def _make_label_rows(lines: Sequence[tuple[CellMark, Mapping[str, Any]]], ignored_keys: Collection[str]) -> list[CellRow]:
    cells = [_drop_keys(mark.row.cell, ignored_keys) | {"gpus": mark.row.cell["gpus"]} | dict(extra) for mark, extra in lines]
    return [msgspec.structs.replace(mark.row, cell=cell) for (mark, _), cell in zip(lines, cells, strict=True)]


def _drop_keys(cell: Mapping[str, Any], ignored_keys: Collection[str]) -> dict[str, Any]:
    """The cell without the keys of bookkeeping and without `ignored_keys`, which may be options (`options.NAME`)."""
    dropped_keys = find_role_keys(Role.BOOKKEEPING).union(ignored_keys)
    remaining_keys = {key: value for key, value in cell.items() if key not in dropped_keys}
    if "options" in remaining_keys:
        remaining_keys["options"] = {
            name: value for name, value in remaining_keys["options"].items() if f"options.{name}" not in dropped_keys
        }
    return remaining_keys
