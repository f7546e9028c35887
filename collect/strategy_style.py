"""How a strategy is drawn: the same look in all figures of a report, and another one than every other strategy has.

Colour and shape are the strategy's own. The fill of the shape and the dash of the line tell apart what else a strategy ran
with, such as another number of ranks. So a reader who sees no colours still has shapes, and a line without marks has its dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

COLOURS = 8  # series colours of the page, see collect/report/palette.py
SHAPES = (
    "circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "pentagon", "x", "hexagram",
    "star-square", "star-triangle-up",
)  # fmt: skip
FILLS = ("", "-open", "-dot", "-open-dot")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS_A_LINE = 6
MOST_STRATEGIES, MOST_VARIANTS = 24, 24  # that all have a look of their own; more go round


class Look(msgspec.Struct, frozen=True):
    """colour: a CSS variable of the page; symbol, dash: plotly's names."""

    colour: str
    symbol: str = SHAPES[0]
    dash: str = DASHES[0]

    @property
    def line(self) -> dict[str, Any]:
        """A line as plotly takes it."""
        return {"color": self.colour, "dash": self.dash, "width": 2}

    def marks(self, size_px: float) -> dict[str, Any]:
        """Marks as plotly takes them; their outline is as wide as that of an open shape has to be."""
        outline = {"color": self.colour, "width": 1.5}
        return {"color": self.colour, "symbol": self.symbol, "size": size_px, "line": outline}

    @property
    def some_marks(self) -> dict[str, Any]:
        """A few marks along a line of many points: they tell it from others without hiding it."""
        return self.marks(6) | {"maxdisplayed": MARKS_A_LINE}


def look(strategy: int, variant: int = 0) -> Look:
    """The look of the n-th strategy of a report in the n-th of its variants, both from 0.

    Every 8 strategies the colours come round again, each time with shapes and dashes that are further on. Every 12 variants
    the pairs of fill and dash come round (both of their lengths divide 12), so the dash is moved by one.
    """
    turn = strategy // COLOURS
    shape = SHAPES[(strategy + turn) % len(SHAPES)]
    dash = DASHES[(variant + variant // 12 + turn) % len(DASHES)]
    return Look(f"var(--series-{strategy % COLOURS + 1})", shape + FILLS[variant % len(FILLS)], dash)


def variants(strategies: Sequence[int]) -> list[Look]:
    """A look for each entry of a figure, given the strategy of each: the n-th entry of a strategy is its n-th variant."""
    counts: Counter[int] = Counter()
    found = []
    for strategy in strategies:
        found.append(look(strategy, counts[strategy]))
        counts[strategy] += 1
    return found
