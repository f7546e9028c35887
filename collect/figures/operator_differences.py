"""Draws the operators or kernels whose time differs most between a cell and its baseline."""

from __future__ import annotations

import html
import re
from typing import Any, NamedTuple

from collect import notation
from collect.drawing.stacked_bars import lines
from collect.figure import MUTED, CellMark, Figure, Group, axis
from collect.traces import gloo, per_step
from collect.traces.breakdown import Breakdown, EventTally
from collect.traces.per_step import Use

NAME = "operator_differences"
MOST_NAMES = 10
MOST_CELLS = 6  # the most cells that are drawn, because each name has one bar per cell
NAME_PX, BAR_PX, GAP_PX, MARGIN_PX, LEGEND_PX = 20, 13, 8, 70, 16
# The most characters of a shown name. If its arguments are shown, the part before them has at most HEAD_LENGTH characters.
NAME_LENGTH, HEAD_LENGTH = 44, 20
_NAMESPACES = re.compile(r"^void |\(anonymous namespace\)::|at::native::")
_ARGUMENTS = re.compile(r"(?<=\w)[<(]")
SMALLEST = 0.01  # share of the longest bar: a name whose bars are all shorter is left out, and a shorter bar gets no number
ROOM = 0.22  # share of the x axis that is left free on both sides for the numbers beside the bars


class BaselinePair(NamedTuple):
    """A cell and its baseline, each with the calls and times of its kernels or operators in a profiled step."""

    mark: CellMark  # the cell
    here: dict[str, Use]  # name of a kernel or operator -> its calls and time in the cell
    against: CellMark  # the baseline
    there: dict[str, Use]  # name of a kernel or operator -> its calls and time in the baseline


def draw(group: Group) -> Figure | None:
    """Draw one row per operator or kernel, with one bar for each cell that was profiled in the same way as its baseline.

    At most MOST_CELLS cells are drawn.
    """
    by_id = {mark.row.id: mark for mark in group.marks}
    pairs = []
    for mark in group.marks:
        against = by_id.get(mark.row.baseline or "")
        if against is not None and against is not mark and _kind(mark) is not None and _kind(mark) == _kind(against):
            pairs.append((mark, against))
    shown = [BaselinePair(mark, uses(mark), against, uses(against)) for mark, against in pairs[:MOST_CELLS]]
    names = largest(shown)
    if not names:
        return None
    line_px = NAME_PX + BAR_PX * len(shown) + GAP_PX
    data = [_bars(names, place, line_px, pair) for place, pair in enumerate(shown)]
    left_out = f" {len(pairs) - len(shown)} more cells are not drawn." if len(pairs) > len(shown) else ""
    caption = (
        f"Time per step minus that of the cell's baseline ({group.baseline}); bars left of 0: less time than the baseline. "
        f"Mean over profiled ranks and repeats. At most {MOST_NAMES} names, those that differ most. The time of an operator "
        f"includes the operators that it calls; autograd's wrappers around operators are not shown.{left_out}"
    )
    height_px = MARGIN_PX + LEGEND_PX * len(shown) + line_px * len(names)
    return Figure(NAME, "Operators against the baseline", caption, height_px, data, _layout(names, data, line_px))


def largest(pairs: list[BaselinePair]) -> list[str]:
    """The kernels or operators whose time differs most in any pair, largest difference first; small differences are left
    out."""
    differs: dict[str, float] = {}
    for pair in pairs:
        for name in pair.here.keys() | pair.there.keys():
            differs[name] = max(differs.get(name, 0), abs(_more(name, pair)))
    least = SMALLEST * max(differs.values(), default=0)
    return sorted((name for name in differs if differs[name] > least), key=lambda name: (-differs[name], name))[:MOST_NAMES]


def uses(mark: CellMark) -> dict[str, Use]:
    """The calls and times of each kernel or operator in a step of a cell, as the mean over the cell's completed runs.

    The wrappers that autograd puts around operators are left out.
    """
    return per_step.uses((run.traces.exact for run in mark.cell.completed), _unwrapped)


def _unwrapped(one: Breakdown) -> list[EventTally]:
    return [tally for tally in one.kernels if not tally.name.startswith(gloo.WRAPPER)]


def _kind(mark: CellMark) -> str | None:
    """`kernels` or `operators`: which of the two the profiles of a cell name. Kernels cannot be compared with operators.

    None if the cell was not profiled, or if some of its runs name kernels and others name operators.
    """
    sources = {one.source for run in mark.cell.completed for one in run.traces.exact if one.steps}
    kinds = {"kernels" if source == "gpu" else "operators" for source in sources}
    return kinds.pop() if len(kinds) == 1 else None


def _more(name: str, pair: BaselinePair) -> float:
    """The time of the kernel or operator `name` in the cell minus its time in the baseline, in ms per step.

    If a cell does not call it, its time is 0.
    """
    return (pair.here[name].ms if name in pair.here else 0) - (pair.there[name].ms if name in pair.there else 0)


def _bars(names: list[str], place: int, line_px: int, pair: BaselinePair) -> dict[str, Any]:
    """The bars of one cell. In each row, the name of the kernel or operator is at the top, and the bars of the cells are below
    it.

    place: the number of the cell in the list of drawn cells, from 0.
    """
    more = [_more(name, pair) for name in names]
    seen = SMALLEST * max(map(abs, more))
    sides = ((pair.mark, pair.here), (pair.against, pair.there))
    says = ["<br>".join((html.escape(name, quote=False), *(_said(*side, name) for side in sides))) for name in names]
    return {
        "type": "bar",
        "orientation": "h",
        "name": pair.mark.label,
        "meta": pair.mark.row.id,
        "x": more,
        "y": list(range(len(names))),
        "offset": (NAME_PX + BAR_PX * place) / line_px,
        "width": (BAR_PX - 1) / line_px,
        "text": [f"{'+' if value > 0 else '−'}{notation.number(abs(value), 3)}" if abs(value) > seen else "" for value in more],
        "textposition": "outside",
        "textfont": {"size": 10, "color": MUTED},
        "cliponaxis": False,
        "customdata": says,
        "marker": {"color": pair.mark.look.colour},
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _said(mark: CellMark, uses: dict[str, Use], name: str) -> str:
    use = uses.get(name)
    says = f"{notation.number(use.ms)} ms in {notation.number(use.calls, 3)} calls per step" if use else "not called"
    return f"{mark.label}: {says}"


def _layout(names: list[str], data: list[dict[str, Any]], line_px: int) -> dict[str, Any]:
    values = [value for bars in data for value in bars["x"]]
    low, high = min(0, *values), max(0, *values)
    room = ROOM * (high - low)
    x = axis("additional ms per step", range=[low - room if low else -room / 4, high + room], zeroline=True, nticks=5)
    shape = lines([html.escape(name, quote=False) for name in short(names)], NAME_PX, line_px)
    shape["xaxis"] = x | {"zerolinecolor": MUTED}
    return shape


def short(names: list[str]) -> list[str]:
    """Shorten the names of kernels: remove namespaces, template arguments and parameters.

    If several kernels would then have the same name, the beginning of their arguments is kept.
    """
    whole = [_NAMESPACES.sub("", name) for name in names]
    bare = [_ARGUMENTS.split(name, maxsplit=1)[0] for name in whole]
    return [
        _cut(base, NAME_LENGTH)
        if bare.count(base) == 1
        else f"{_cut(base, HEAD_LENGTH)}{name[len(base) :][: NAME_LENGTH - HEAD_LENGTH - 1]}…"
        for name, base in zip(whole, bare, strict=True)
    ]


def _cut(name: str, length: int) -> str:
    """Cut the middle out of a name that is longer than `length`: the names of kernels often differ only at the end."""
    return name if len(name) <= length else f"{name[: length - length // 3 - 1]}…{name[-(length // 3) :]}"
