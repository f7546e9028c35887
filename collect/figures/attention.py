"""Draws which attention kernels ran in a profiled step of each cell, and how long they ran."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
from collect.figure import CellMark, Figure, Group
from collect.findings.trace_details import attention_of

NAME = "attention"
PARTS = {  # (implementation of attention, whether this is the backward pass) -> colour of the part
    ("flash", False): "var(--series-1)",
    ("flash", True): "var(--series-2)",
    ("efficient", False): "var(--series-3)",
    ("efficient", True): "var(--series-4)",
    ("cudnn", False): "var(--series-5)",
    ("cudnn", True): "var(--series-6)",
    ("math", False): "var(--series-7)",
    ("flex", False): "var(--ink)",
    ("flex", True): "var(--muted)",
    ("fused", False): "var(--ink)",
    ("fused", True): "var(--muted)",
}


def draw(group: Group) -> Figure | None:
    """Draw one bar for each cell whose traces show attention."""
    shown, left_out = some(group, lambda mark: bool(times(mark)))
    if not shown.marks:
        return None
    found = [times(mark) for mark in shown.marks]
    bars = [
        BarPart(
            f"{backend}, {'backward' if backward else 'forward'}", colour, [time.get((backend, backward)) for time in found]
        )
        for (backend, backward), colour in PARTS.items()
        if any((backend, backward) in time for time in found)
    ]
    caption = (
        "One profiled step; mean over profiled ranks and repeats. The time of the kernels of each implementation of attention; "
        f"on a CPU, of its operators. The backward pass of math consists of ordinary operators and is not drawn.{left_out}"
    )
    ends = [notation.number(sum(time.values()), 3) for time in found]
    return stacked(NAME, "Attention", caption, shown, [BarPanel("ms per step", "ms", bars, ends)])


def times(mark: CellMark) -> dict[tuple[str, bool], float]:
    """Milliseconds of attention in a profiled step: {(implementation, whether this is the backward pass): milliseconds}.

    Kernels whose time is not known are left out.
    """
    found: dict[tuple[str, bool], float] = {}
    for use in attention_of(mark.cell):
        if use.ms:
            key = (use.backend, use.backward)
            found[key] = found.get(key, 0) + use.ms
    return found
