"""Draws the memory of a device over the profiled steps of each cell, from the allocations that the traces record."""

from __future__ import annotations

from typing import Any

from collect import notation
from collect.figure import CellMark, Figure, Group, axis, layout
from collect.traces.memory_use import MemoryUse

NAME = "profiled_memory"
HEIGHT_PX = 340
MOST_LINES = 12


def draw(group: Group) -> Figure | None:
    """Draw one line for each cell whose traces record memory, for one device of the cell's first completed repeat.

    The device is the one with the highest peak of memory in this repeat.
    """
    mark_uses = [(mark, use) for mark in group.marks if (use := highest_memory_use(mark)) is not None]
    if not mark_uses:
        return None
    drawn = mark_uses[:MOST_LINES]
    unit, size = notation.bytes_unit([use.peak_bytes for _, use in drawn])
    data = [_memory_trace(mark, use, unit, size) for mark, use in drawn]
    left_out_note = f" {len(mark_uses) - len(drawn)} more cells are not drawn." if len(mark_uses) > len(drawn) else ""
    caption = (
        "Memory that PyTorch's allocator had allocated, in the profiled steps of the first completed repeat, on the device "
        "with the highest peak. Each point is the highest of its part of the curve. On a GPU: of all tensors; on a CPU: what "
        f"was allocated since the recording began.{left_out_note}"
    )
    figure_layout = layout(
        axis("ms since the first profiled step began", showgrid=False), axis(unit, rangemode="tozero"), showlegend=True
    )
    return Figure(NAME, "Memory of the profiled steps", caption, HEIGHT_PX, data, figure_layout)


def highest_memory_use(mark: CellMark) -> MemoryUse | None:
    """The memory of the device with the highest peak in the first completed repeat of a cell; None if its traces record no
    memory.

    A CPU is only chosen if the traces record the memory of no GPU.
    """
    runs = mark.cell.completed[:1]
    uses = [use for run in runs for rank in run.traces.analyses if rank.steps for use in rank.memory]
    uses = [use for use in uses if use.device != "cpu"] or uses
    return max(uses, key=lambda use: use.peak_bytes, default=None)


def _memory_trace(mark: CellMark, use: MemoryUse, unit: str, size: float) -> dict[str, Any]:
    reserved = (
        "" if use.peak_reserved_bytes is None else f", {notation.format_number(use.peak_reserved_bytes / size)} {unit} reserved"
    )
    return {
        "type": "scatter",
        "mode": "lines",
        "name": mark.label,
        "meta": mark.row.id,
        "x": [point.at_ns / 1e6 for point in use.points],
        "y": [point.allocated / size for point in use.points],
        "line": {"color": mark.look.colour, "dash": mark.look.dash, "shape": "hv", "width": 1.5},
        "hovertemplate": f"{use.device}: %{{y:,.4~g}} {unit} at %{{x:,.4~g}} ms<br>peak: "
        f"{notation.format_number(use.peak_bytes / size)} {unit}{reserved}<extra>{mark.label}</extra>",
    }
