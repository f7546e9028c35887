"""Draws how large parameters, gradients and optimizer state are on a rank, compared with the estimate of the ZeRO paper."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars, select_cells
from collect.figure import CellMark, Figure, Group
from collect.figures.memory_timeline import CATEGORIES, category_label

NAME = "sharding"
# Term of the estimate -> the memory categories that are measured for this term. The estimate of `optimizer_state` does not
# contain `master_parameter`, the optimizer's own copy of the weights.
TERMS = {
    "parameter": ("parameter",),
    "gradient": ("gradient",),
    "optimizer_state": ("optimizer_state", "master_parameter"),
}


def draw(group: Group) -> Figure | None:
    """Draw one panel per term of the estimate, with one bar for each cell that has an estimate."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(estimate_bytes(mark)))
    if not drawn_group.marks:
        return None
    estimates = [estimate_bytes(mark) for mark in drawn_group.marks]
    measured = [{name: _measured_bytes(mark, name) for names in TERMS.values() for name in names} for mark in drawn_group.marks]
    known_sizes = [value for sizes in measured for value in sizes.values() if value]
    unit, size = notation.bytes_unit([*known_sizes, *(value for sizes in estimates for value in sizes.values())])
    panels = []
    for term, names in TERMS.items():
        parts = [
            BarPart(category_label(name), CATEGORIES[name], [_scale(size, sizes[name]) for sizes in measured])
            for name in names
            if any(sizes[name] for sizes in measured)
        ]
        end_texts = [notation.format_number(sum(sizes[name] or 0 for name in names) / size, 3) for sizes in measured]
        strokes = [_scale(size, sizes.get(term)) for sizes in estimates]
        panels.append(BarPanel(f"{term.removesuffix('_state')}, {unit}", unit, parts, end_texts, strokes))
    caption = (
        "The largest size of each during the observed step, on the rank with the highest peak. Vertical mark: estimate, "
        "sharded as in the ZeRO paper (a gradient is as large as its parameter, Adam's state twice as large); the optimizer's "
        f"own copy of the weights is not in the estimate.{left_out_note}"
    )
    return draw_bars(NAME, "What sharding leaves on a rank", caption, drawn_group, panels)


def estimate_bytes(mark: CellMark) -> dict[str, int]:
    """The estimate for a cell in bytes, by term (TERMS). It is read from one completed repeat, because it is equal in all
    repeats."""
    estimates = [run.result.instruments.get("memory", {}).get("estimate_bytes") for run in mark.cell.completed if run.result]
    return next((estimate for estimate in estimates if estimate), {})


def _measured_bytes(mark: CellMark, category: str) -> float | None:
    estimate = mark.row.metrics.get(f"memory_{category}_bytes")
    return estimate.value if estimate else None


def _scale(size: float, value: float | None) -> float | None:
    return None if value is None else value / size
