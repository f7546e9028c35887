"""Draws what each segment of the CUDA allocator holds after a step, as study 2 does in section 4.2.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect import notation
from collect.drawing import allocator
from collect.figure import LINE, Figure, Group, add_cell_id, axis, layout
from collect.sources import snapshot
from collect.sources.snapshot import AllocatorSegment

MOST_SEGMENTS = 60  # the most segments that are drawn; the largest segments are drawn
USES = {"in use": allocator.IN_USE, "waiting to be freed": "var(--series-5)", "free": LINE}


def draw(group: Group) -> Figure | None:
    """Draw the first cell that has a snapshot: the blocks of each segment after the observed step."""
    if (mark_and_snapshot := allocator.first_snapshot(group)) is None:
        return None
    mark, rank_snapshot = mark_and_snapshot
    if not rank_snapshot.segments:
        return None
    sorted_segments = sorted(rank_snapshot.segments, key=lambda segment: -segment.total_size)
    drawn = sorted_segments[:MOST_SEGMENTS]
    unit, size = notation.bytes_unit([float(drawn[0].total_size)])
    data = add_cell_id(mark, [_block_bars(name, drawn, unit, size) for name in USES])
    smaller = sorted_segments[MOST_SEGMENTS:]
    left_out_note = f" {len(smaller)} smaller segments are not drawn." if smaller else ""
    caption = (
        f"{allocator.snapshot_caption(mark, rank_snapshot)} After the step: one row per segment, the largest at the top, with "
        f"its blocks in the order of their addresses. Free blocks between blocks in use are fragments.{left_out_note}"
    )
    y = axis("segment", range=[len(drawn) - 0.5, -0.5], showticklabels=False, showgrid=False)
    frame = layout(axis(unit, rangemode="tozero"), y, showlegend=True, barmode="overlay", bargap=0.15)
    return Figure("allocator_state", "What the allocator's segments hold", caption, max(180, 100 + 7 * len(drawn)), data, frame)


def _block_bars(name: str, segments: Sequence[AllocatorSegment], unit: str, size: float) -> dict[str, Any]:
    """The blocks with the use `name` (a key of USES) as bars. A bar reaches from the start to the end of its block."""
    bars = [
        (row, start / size, block.size / size)
        for row, segment in enumerate(segments)
        for start, block in zip(_block_starts(segment), segment.blocks, strict=True)
        if _block_use(block.state) == name
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row for row, _, _ in bars],
        "base": [start for _, start, _ in bars],
        "x": [length for _, _, length in bars],
        "marker": {"color": USES[name], "line": {"width": 0}},
        "hovertemplate": f"{name}: %{{x:,.4~g}} {unit}<extra></extra>",
    }


def _block_starts(segment: AllocatorSegment) -> list[int]:
    starts, start = [], 0
    for block in segment.blocks:
        starts.append(start)
        start += block.size
    return starts


def _block_use(block_state: str) -> str:
    if block_state == "active_allocated":
        return "in use"
    return "waiting to be freed" if block_state in snapshot.ACTIVE else "free"
