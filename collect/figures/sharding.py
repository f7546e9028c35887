"""Draws how large parameters, gradients and optimizer state are on a rank, compared with the estimate of the ZeRO paper."""

from __future__ import annotations

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, some
from collect.drawing.stacked_bars import draw as stacked
from collect.figure import CellMark, Figure, Group
from collect.figures.memory_timeline import CATEGORIES, written

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
    shown, left_out = some(group, lambda mark: bool(estimate_bytes(mark)))
    if not shown.marks:
        return None
    estimates = [estimate_bytes(mark) for mark in shown.marks]
    measured = [{name: _bytes(mark, name) for names in TERMS.values() for name in names} for mark in shown.marks]
    known = [value for found in measured for value in found.values() if value]
    unit, size = notation.bytes_unit([*known, *(value for found in estimates for value in found.values())])
    panels = []
    for term, names in TERMS.items():
        parts = [
            BarPart(written(name), CATEGORIES[name], [_in(size, found[name]) for found in measured])
            for name in names
            if any(found[name] for found in measured)
        ]
        ends = [notation.number(sum(found[name] or 0 for name in names) / size, 3) for found in measured]
        panels.append(
            BarPanel(
                f"{term.removesuffix('_state')}, {unit}", unit, parts, ends, [_in(size, found.get(term)) for found in estimates]
            )
        )
    caption = (
        "The largest size of each during the observed step, on the rank with the highest peak. Vertical mark: estimate, "
        "sharded as in the ZeRO paper (a gradient is as large as its parameter, Adam's state twice as large); the optimizer's "
        f"own copy of the weights is not in the estimate.{left_out}"
    )
    return stacked(NAME, "What sharding leaves on a rank", caption, shown, panels)


def estimate_bytes(mark: CellMark) -> dict[str, int]:
    """The estimate for a cell in bytes, by term (TERMS). It is read from one completed repeat, because it is equal in all
    repeats."""
    found = [run.result.instruments.get("memory", {}).get("estimate_bytes") for run in mark.cell.completed if run.result]
    return next((estimate for estimate in found if estimate), {})


def _bytes(mark: CellMark, category: str) -> float | None:
    found = mark.row.metrics.get(f"memory_{category}_bytes")
    return found.value if found else None


def _in(size: float, value: float | None) -> float | None:
    return None if value is None else value / size
