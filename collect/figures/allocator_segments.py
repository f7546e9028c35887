"""Draws the memory that the CUDA allocator had reserved during a step, as study 2 does in section 4.2.3."""

from __future__ import annotations

from collect import notation
from collect.drawing import allocator
from collect.figure import MUTED, Figure, Group


def draw(group: Group) -> Figure | None:
    """Draw the first cell that has a snapshot: the memory that the allocator had reserved, and how much of it was in use."""
    if (pair := allocator.first_snapshot(group)) is None or (history := pair[0].cell.completed[0].allocator_history) is None:
        return None
    mark, snapshot = pair
    totals = history.in_use
    unit, size = notation.bytes_unit(list(map(float, history.reserved)))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": indexes,
            "y": [values[index] / size for index in indexes],
            "fill": "tozeroy",
            "line": {"width": 1.5, "color": colour, "shape": "hv"},
            "hovertemplate": f"{name}: %{{y:,.4~g}} {unit}<extra></extra>",
        }
        for name, values, colour in (("reserved", history.reserved, MUTED), ("in use", totals, allocator.IN_USE))
        for indexes in [allocator.pick_indexes(values)]
    ]
    caption = (
        f"{allocator.snapshot_caption(mark, snapshot)} Reserved: all segments that the allocator took from the GPU. What is "
        "reserved and not in use is free for later, or lost to fragmentation."
    )
    return allocator.history_figure("allocator_segments", "Segments of the allocator", caption, unit, mark, data)
