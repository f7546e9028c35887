"""Draws the blocks of the CUDA allocator that were in use during a step, as study 2 does in section 4.2.2."""

from __future__ import annotations

from collect import notation
from collect.drawing import allocator
from collect.figure import Figure, Group
from collect.sources.snapshot import BEFORE, SIZES

COLOURS = dict(zip((BEFORE, *SIZES), (f"var(--series-{number})" for number in (1, 4, 6, 3, 5)), strict=True))


def draw(group: Group) -> Figure | None:
    """Draw the first cell that has a snapshot: its blocks in use during the observed step, stacked by size."""
    if (pair := allocator.first_snapshot(group)) is None or (history := pair[0].cell.completed[0].allocator_history) is None:
        return None
    mark, snapshot = pair
    totals = history.in_use
    indexes = allocator.pick_indexes(totals)
    unit, size = notation.bytes_unit(list(map(float, totals)))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": indexes,
            "y": [sizes[index] / size for index in indexes],
            "stackgroup": "blocks",
            "line": {"width": 0.5, "color": COLOURS[name], "shape": "hv"},
            "fillcolor": COLOURS[name],
            "hovertemplate": f"{name}: %{{y:,.4~g}} {unit}<extra></extra>",
        }
        for name, sizes in history.active.items()
        if any(sizes)
    ]
    caption = (
        f"{allocator.snapshot_caption(mark, snapshot)} Blocks that were in use, stacked by the size of the block; a block "
        "counts until its memory is free again. Peaks are kept where points are left out."
    )
    return allocator.history_figure("allocator_active", "Blocks of the allocator in use", caption, unit, mark, data)
