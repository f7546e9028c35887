"""Draws what each segment of the CUDA allocator holds after a step, as study 2 does in section 4.2.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect import notation
from collect.drawing import allocator
from collect.figure import LINE, Figure, Group, axis, layout, of_cell
from collect.sources import snapshot
from collect.sources.snapshot import AllocatorSegment

MOST_SEGMENTS = 60  # the most segments that are drawn; the largest segments are drawn
USES = {"in use": allocator.IN_USE, "waiting to be freed": "var(--series-5)", "free": LINE}


def draw(group: Group) -> Figure | None:
    """Draw the first cell that has a snapshot: the blocks of each segment after the observed step."""
    if (found := allocator.first(group)) is None:
        return None
    mark, seen = found
    if not seen.segments:
        return None
    ordered = sorted(seen.segments, key=lambda segment: -segment.total_size)
    shown = ordered[:MOST_SEGMENTS]
    unit, size = notation.bytes_unit([float(shown[0].total_size)])
    data = of_cell(mark, [_blocks(name, shown, unit, size) for name in USES])
    left = ordered[MOST_SEGMENTS:]
    left_out = f" {len(left)} smaller segments are not drawn." if left else ""
    caption = (
        f"{allocator.about(mark, seen)} After the step: one row per segment, the largest at the top, with its blocks "
        f"in the order of their addresses. Free blocks between blocks in use are fragments.{left_out}"
    )
    y = axis("segment", range=[len(shown) - 0.5, -0.5], showticklabels=False, showgrid=False)
    shape = layout(axis(unit, rangemode="tozero"), y, showlegend=True, barmode="overlay", bargap=0.15)
    return Figure("allocator_state", "What the allocator's segments hold", caption, max(180, 100 + 7 * len(shown)), data, shape)


def _blocks(name: str, shown: Sequence[AllocatorSegment], unit: str, size: float) -> dict[str, Any]:
    """The blocks with the use `name` (a key of USES) as bars. A bar reaches from the start to the end of its block."""
    bars = [
        (row, start / size, block.size / size)
        for row, segment in enumerate(shown)
        for start, block in zip(_starts(segment), segment.blocks, strict=True)
        if _use(block.state) == name
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


def _starts(segment: AllocatorSegment) -> list[int]:
    starts, start = [], 0
    for block in segment.blocks:
        starts.append(start)
        start += block.size
    return starts


def _use(block_state: str) -> str:
    if block_state == "active_allocated":
        return "in use"
    return "waiting to be freed" if block_state in snapshot.ACTIVE else "free"
