"""Draws which attention kernels ran in a profiled step of each cell, and how long they ran."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import CellMark, Figure, Group
from collect.findings.trace_details import cell_attention

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
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(attention_ms(mark)))
    if not drawn_group.marks:
        return None
    ms_by_cell = [attention_ms(mark) for mark in drawn_group.marks]
    bars = [
        BarPart(
            f"{backend}, {'backward' if backward else 'forward'}", colour, [ms.get((backend, backward)) for ms in ms_by_cell]
        )
        for (backend, backward), colour in PARTS.items()
        if any((backend, backward) in ms for ms in ms_by_cell)
    ]
    caption = (
        "One profiled step; mean over profiled ranks and repeats. The time of the kernels of each implementation of attention; "
        f"on a CPU, of its operators. The backward pass of math consists of ordinary operators and is not drawn.{left_out_note}"
    )
    end_texts = [notation.format_number(sum(ms.values()), 3) for ms in ms_by_cell]
    return draw_bars(NAME, "Attention", caption, drawn_group, [BarPanel("ms per step", "ms", bars, end_texts)])


def attention_ms(mark: CellMark) -> dict[tuple[str, bool], float]:
    """Milliseconds of attention in a profiled step: {(implementation, whether this is the backward pass): milliseconds}.

    Kernels whose time is not known are left out.
    """
    ms_by_kernel: dict[tuple[str, bool], float] = {}
    for use in cell_attention(mark.cell):
        if use.ms:
            key = (use.backend, use.backward)
            ms_by_kernel[key] = ms_by_kernel.get(key, 0) + use.ms
    return ms_by_kernel
