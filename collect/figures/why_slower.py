"""Draws why a step of a cell takes more or less time than a step of its baseline: by parts that sum to the difference."""

from __future__ import annotations

from collect.drawing import stacked_bars
from collect.drawing.axes import make_axis
from collect.drawing.panel_rows import split_rows
from collect.drawing.stacked_bars import BAR_PX, LABEL_PX, LEGEND_PX, MARGIN_PX, ROW_PX
from collect.drawing.traces import make_horizontal_bars
from collect.figure import LINE, MUTED, SERIES, Figure, WorkloadGroup
from collect.findings.trace_answers import compare_steps_with_baseline
from collect.traces.difference import StepDifference
from shardlab.terminal import notation

COLOUR_BY_PART = {
    "compute": SERIES[1], "communication: transfer": SERIES[2], "communication: waiting for slow ranks": SERIES[4],
    "communication, waiting included": SERIES[6], "memory operations": SERIES[5], "idle: host": SERIES[3],
    "idle: communication": SERIES[7], "idle: other": LINE,
}  # fmt: skip
FREE_SHARE = 0.16  # share of the x axis that is left free on each side for the numbers beside the bars


def draw(group: WorkloadGroup) -> Figure | None:
    """Draw one bar for each cell that was profiled in the same way as its baseline.

    Parts of a step that take longer than in the baseline extend to the right, parts that take less time extend to the left.
    """
    pairs = [(mark, compare_steps_with_baseline(mark.cell, baseline.cell)) for mark, baseline in group.pairs_with_baselines]
    drawn_differences = [(mark, difference) for mark, difference in pairs if difference is not None]
    if not drawn_differences:
        return None
    drawn_differences, left_out_note = stacked_bars.limit_entries(drawn_differences, lambda pair: pair[0])
    cells = [sum_difference_parts(difference) for _, difference in drawn_differences]
    y, cell_ids = ([stacked_bars.locate_bar(row) for row in range(len(cells))], [mark.row.id for mark, _ in drawn_differences])
    data = []
    for part, colour in COLOUR_BY_PART.items():
        if any(parts.get(part) for parts in cells):
            bar_style = {"marker": {"color": colour}, "width": BAR_PX / ROW_PX}
            hover_template = f"{part}: %{{x:+,.4~g}} ms<extra></extra>"
            bar_trace = make_horizontal_bars([parts.get(part, 0) for parts in cells], y, name=part, meta=cell_ids, **bar_style)
            data.append(bar_trace | {"hovertemplate": hover_template})
    bar_ends = [sum(part_ms for part_ms in parts.values() if part_ms > 0) for parts in cells]
    data.append(stacked_bars.make_end_trace(bar_ends, [_format_difference(difference) for _, difference in drawn_differences]))
    lowest_ms, highest = min(sum(part_ms for part_ms in parts.values() if part_ms < 0) for parts in cells), max(bar_ends)
    room = FREE_SHARE * (highest - lowest_ms)
    x_axis = make_axis("additional ms per step", range=[lowest_ms - room, highest + room], zeroline=True, nticks=5, tickangle=0)
    layout = stacked_bars.make_labelled_rows_layout([mark.label for mark, _ in drawn_differences], LABEL_PX, ROW_PX)
    layout |= {"barmode": "relative", "xaxis": x_axis | {"zerolinecolor": MUTED}}
    layout["legend"] |= {"traceorder": "normal", "font": {"size": 11}}
    caption = (
        f"A profiled step minus one of the cell's baseline ({group.baseline}), mean over profiled ranks and repeats. Parts "
        "to the right take longer, parts to the left take less time; the number is the whole difference, to which the parts "
        f"sum exactly. Communication counts while nothing computes.{left_out_note}"
    )
    height_px = MARGIN_PX + LEGEND_PX * len(data) + ROW_PX * len(drawn_differences)
    figure = Figure("why_slower", "Why a step takes longer", caption, height_px, data, layout)
    return split_rows(figure, [mark for mark, _ in drawn_differences])


def sum_difference_parts(difference: StepDifference) -> dict[str, float]:
    """Additional milliseconds of a step, compared with the baseline, by legend entry (COLOURS). All collectives are summed."""
    ms_by_part: dict[str, float] = {}
    for part_difference in difference.parts:
        part_kind, cause = part_difference.part.kind, part_difference.part.cause
        if part_kind == "communication":
            part_name = f"communication: {cause}" if cause else "communication, waiting included"
        elif part_kind == "idle":
            part_name = f"idle: {cause}" if f"idle: {cause}" in COLOUR_BY_PART else "idle: other"
        else:
            part_name = "memory operations" if part_kind == "memory" else part_kind
        ms_by_part[part_name] = ms_by_part.get(part_name, 0) + part_difference.difference_ns / 1e6
    return ms_by_part


def _format_difference(difference: StepDifference) -> str:
    """The whole difference of a step from the baseline, in ms."""
    sign = "+" if difference.difference_ns > 0 else "−" if difference.difference_ns < 0 else ""
    return f"{sign}{notation.format_number(abs(difference.difference_ns) / 1e6, 3)}"
