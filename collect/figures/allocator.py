"""Draws the CUDA allocator during a step, as study 2 does (section 4.2): blocks in use, reserved memory, and segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from collect.drawing.axes import make_axis, make_layout
from collect.drawing.traces import make_points, make_span_bars, pick_points
from collect.figure import LINE, MUTED, SERIES, CellMark, Figure, WorkloadGroup
from collect.sources import snapshot
from collect.sources.snapshot import BEFORE_STEP, SIZE_CLASSES, AllocatorHistory, AllocatorSnapshot
from shardlab.terminal import notation

MOST_POINTS = 400  # about the most points of a curve
HISTORY_HEIGHT_PX = 320  # of the two figures over the history
MOST_SEGMENTS = 60  # the most segments that are drawn; the largest segments are drawn
COLOUR_BY_BLOCK_SIZE = dict(zip((BEFORE_STEP, *SIZE_CLASSES), (SERIES[number] for number in (1, 4, 6, 3, 5)), strict=True))
COLOUR_BY_BLOCK_USE = {"in use": SERIES[1], "waiting to be freed": SERIES[5], "free": LINE}


def _find_first_snapshot(group: WorkloadGroup) -> tuple[CellMark, AllocatorSnapshot, AllocatorHistory | None] | None:
    """The first cell whose first completed repeat has a snapshot of rank 0, the snapshot, and the history of the step."""
    runs_of_marks = ((mark, mark.first_run) for mark in group.marks)
    return next(((mark, run.snapshot, run.allocator_history) for mark, run in runs_of_marks if run and run.snapshot), None)


def _start_caption(mark: CellMark, rank_snapshot: AllocatorSnapshot) -> str:
    return f"{mark.label}, step {rank_snapshot.step}, rank {rank_snapshot.rank}."


def draw_active_blocks(group: WorkloadGroup) -> Figure | None:
    """Draw the first cell that has a snapshot: its blocks in use during the observed step, stacked by size."""
    if (first := _find_first_snapshot(group)) is None or (history := first[2]) is None:
        return None
    point_indexes = pick_points(history.in_use_bytes, MOST_POINTS)
    points_by_curve = {
        name: (point_indexes, sizes_bytes) for name, sizes_bytes in history.active_bytes_by_class.items() if any(sizes_bytes)
    }
    style_by_curve: dict[str, dict[str, Any]] = {
        name: {"stackgroup": "blocks", "line": {"width": 0.5, "color": colour, "shape": "hv"}, "fillcolor": colour}
        for name, colour in COLOUR_BY_BLOCK_SIZE.items()
    }
    caption = (
        f"{_start_caption(*first[:2])} Blocks that were in use, stacked by the size of the block; a block "
        "counts until its memory is free again. Peaks are kept where points are left out."
    )
    figure = Figure("allocator_active", "Blocks of the allocator in use", caption, HISTORY_HEIGHT_PX, [], {})
    return _add_curves(figure, first[0], points_by_curve, style_by_curve, max(history.in_use_bytes))


def draw_reserved_memory(group: WorkloadGroup) -> Figure | None:
    """Draw the first cell that has a snapshot: the memory that the allocator had reserved during the observed step, and how
    much of it was in use."""
    if (first := _find_first_snapshot(group)) is None or (history := first[2]) is None:
        return None
    sizes_by_name, colours = (
        {"reserved": history.reserved_bytes, "in use": history.in_use_bytes},
        {"reserved": MUTED} | COLOUR_BY_BLOCK_USE,
    )
    points_by_curve = {curve: (pick_points(sizes, MOST_POINTS), sizes) for curve, sizes in sizes_by_name.items()}
    line_style = {"width": 1.5, "shape": "hv"}
    style_by_curve = {curve: {"fill": "tozeroy", "line": line_style | {"color": colours[curve]}} for curve in points_by_curve}
    caption = (
        f"{_start_caption(*first[:2])} Reserved: all segments that the allocator took from the GPU. What is "
        "reserved and not in use is free for later, or lost to fragmentation."
    )
    figure = Figure("allocator_segments", "Segments of the allocator", caption, HISTORY_HEIGHT_PX, [], {})
    return _add_curves(figure, first[0], points_by_curve, style_by_curve, max(history.reserved_bytes))


def _add_curves(
    figure: Figure,
    mark: CellMark,
    points_by_curve: Mapping[str, tuple[list[int], Sequence[int]]],
    looks: Mapping[str, dict[str, Any]],
    largest_bytes: int,
) -> Figure:
    """Add curves over the entries of the allocator's history of a cell, and their axes, to a figure without data.

    points_by_curve: name of a curve -> the entries that are drawn, and the bytes after all entries. looks: name of a curve ->
    plotly's settings. largest_bytes: the highest value, which decides the unit.
    """
    unit, unit_bytes = notation.choose_unit([float(largest_bytes)])
    for curve, (indexes, sizes_bytes) in points_by_curve.items():
        y, hover = [sizes_bytes[index] / unit_bytes for index in indexes], f"{curve}: %{{y:,.4~g}} {unit}<extra></extra>"
        figure.data.append(make_points("lines", indexes, y, name=curve, meta=mark.row.id, hovertemplate=hover, **looks[curve]))
    x_axis = make_axis("entries of the allocator's history", showgrid=False)
    figure.layout = make_layout(x_axis, make_axis(unit, rangemode="tozero"), showlegend=True)
    return figure


def draw_segment_blocks(group: WorkloadGroup) -> Figure | None:
    """Draw the first cell that has a snapshot: the blocks of each segment after the observed step."""
    if (first := _find_first_snapshot(group)) is None or not first[1].segments:
        return None
    sorted_segments = sorted(first[1].segments, key=lambda segment: -segment.total_size)
    drawn_segments = sorted_segments[:MOST_SEGMENTS]
    unit, unit_bytes = notation.choose_unit([float(drawn_segments[0].total_size)])
    blocks_by_use: dict[str, list[tuple[int, float, float]]] = {name: [] for name in COLOUR_BY_BLOCK_USE}
    for row, segment in enumerate(drawn_segments):
        block_ends = accumulate(block.size for block in segment.blocks)
        for block, block_end in zip(segment.blocks, block_ends, strict=True):
            blocks_by_use[_name_use(block.state)].append((row, (block_end - block.size) / unit_bytes, block.size / unit_bytes))
    data = [
        make_span_bars(blocks_by_use[name], name, colour, f"{name}: %{{x:,.4~g}} {unit}<extra></extra>", meta=first[0].row.id)
        for name, colour in COLOUR_BY_BLOCK_USE.items()
    ]
    left_out_count = len(sorted_segments) - len(drawn_segments)
    left_out_note = f" {left_out_count} smaller segments are not drawn." if left_out_count else ""
    caption = (
        f"{_start_caption(*first[:2])} After the step: one row per segment, the largest at the top, with its "
        f"blocks in the order of their addresses. Free blocks between blocks in use are fragments.{left_out_note}"
    )
    y_axis = make_axis("segment", range=[len(drawn_segments) - 0.5, -0.5], showticklabels=False, showgrid=False)
    layout = make_layout(make_axis(unit, rangemode="tozero"), y_axis, showlegend=True, barmode="overlay", bargap=0.15)
    return Figure(
        "allocator_state", "What the allocator's segments hold", caption, max(180, 100 + 7 * len(drawn_segments)), data, layout
    )


def _name_use(block_state: str) -> str:
    if block_state == "active_allocated":
        return "in use"
    return "waiting to be freed" if block_state in snapshot.ACTIVE_STATES else "free"
