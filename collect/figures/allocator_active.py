"""Draws the blocks of the CUDA allocator that were in use during a step, as study 2 does in section 4.2.2."""

from __future__ import annotations

from collect import notation
from collect.drawing import allocator
from collect.figure import Figure, Group
from collect.sources.snapshot import BEFORE, SIZES

COLOURS = dict(zip((BEFORE, *SIZES), (f"var(--series-{number})" for number in (1, 4, 6, 3, 5)), strict=True))


def draw(group: Group) -> Figure | None:
    """Draw the first cell that has a snapshot: its blocks in use during the observed step, stacked by size."""
    if (found := allocator.first(group)) is None or (history := found[0].cell.completed[0].allocator_history) is None:
        return None
    mark, seen = found
    totals = history.in_use
    places = allocator.picked(totals)
    unit, size = notation.bytes_unit(list(map(float, totals)))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": places,
            "y": [sizes[place] / size for place in places],
            "stackgroup": "blocks",
            "line": {"width": 0.5, "color": COLOURS[name], "shape": "hv"},
            "fillcolor": COLOURS[name],
            "hovertemplate": f"{name}: %{{y:,.4~g}} {unit}<extra></extra>",
        }
        for name, sizes in history.active.items()
        if any(sizes)
    ]
    caption = (
        f"{allocator.about(mark, seen)} Blocks that were in use, stacked by the size of the block; a block counts until "
        "its memory is free again. Peaks are kept where points are left out."
    )
    return allocator.over_history("allocator_active", "Blocks of the allocator in use", caption, unit, mark, data)
