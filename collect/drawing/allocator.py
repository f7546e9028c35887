"""What the three figures of a snapshot of the CUDA allocator share: which run is drawn, and which points of its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect.figure import CellMark, Figure, Group, add_cell_id, axis, layout
from collect.sources.snapshot import AllocatorSnapshot

MOST_POINTS = 400  # about the most points of a curve
HEIGHT_PX = 320
IN_USE = "var(--series-1)"  # the colour of memory in use


def first_snapshot(group: Group) -> tuple[CellMark, AllocatorSnapshot] | None:
    """The first cell whose first completed repeat has a snapshot of rank 0, and the snapshot."""
    for mark in group.marks:
        if mark.cell.completed and (snapshot := mark.cell.completed[0].snapshot):
            return mark, snapshot
    return None


def snapshot_caption(mark: CellMark, snapshot: AllocatorSnapshot) -> str:
    """The beginning of a caption: the cell, the step and the rank."""
    return f"{mark.label}, step {snapshot.step}, rank {snapshot.rank}."


def pick_indexes(values: Sequence[int]) -> list[int]:
    """The indexes of at most about MOST_POINTS values: the largest and the smallest of each of many equal sections."""
    length = -(-2 * len(values) // MOST_POINTS)
    indexes = {0, len(values) - 1}
    for start in range(0, len(values), length):
        section = range(start, min(start + length, len(values)))
        indexes |= {max(section, key=values.__getitem__), min(section, key=values.__getitem__)}
    return sorted(indexes)


def history_figure(name: str, title: str, caption: str, unit: str, mark: CellMark, data: list[dict[str, Any]]) -> Figure:
    """A figure over the entries of the history of a cell. unit: the unit of the y axis."""
    frame = layout(axis("entries of the allocator's history", showgrid=False), axis(unit, rangemode="tozero"), showlegend=True)
    return Figure(name, title, caption, HEIGHT_PX, add_cell_id(mark, data), frame)
