"""What the three figures of a snapshot of the CUDA allocator share: which run is drawn, and which points of its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect.figure import CellMark, Figure, Group, axis, layout, of_cell
from collect.sources.snapshot import AllocatorSnapshot

MOST_POINTS = 400  # about the most points of a curve
HEIGHT_PX = 320
IN_USE = "var(--series-1)"  # the colour of memory in use


def first(group: Group) -> tuple[CellMark, AllocatorSnapshot] | None:
    """The first cell whose first completed repeat has a snapshot of rank 0, and the snapshot."""
    for mark in group.marks:
        if mark.cell.completed and (seen := mark.cell.completed[0].snapshot):
            return mark, seen
    return None


def about(mark: CellMark, seen: AllocatorSnapshot) -> str:
    """The beginning of a caption: the cell, the step and the rank."""
    return f"{mark.label}, step {seen.step}, rank {seen.rank}."


def picked(values: Sequence[int]) -> list[int]:
    """The indexes of at most about MOST_POINTS values: the largest and the smallest of each of many equal sections."""
    length = -(-2 * len(values) // MOST_POINTS)
    kept = {0, len(values) - 1}
    for start in range(0, len(values), length):
        stretch = range(start, min(start + length, len(values)))
        kept |= {max(stretch, key=values.__getitem__), min(stretch, key=values.__getitem__)}
    return sorted(kept)


def over_history(name: str, title: str, caption: str, unit: str, mark: CellMark, data: list[dict[str, Any]]) -> Figure:
    """A figure over the entries of the history of a cell. unit: the unit of the y axis."""
    shape = layout(axis("entries of the allocator's history", showgrid=False), axis(unit, rangemode="tozero"), showlegend=True)
    return Figure(name, title, caption, HEIGHT_PX, of_cell(mark, data), shape)
