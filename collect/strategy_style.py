"""Defines the look of each strategy in figures. It is equal in all figures of a report, and differs from all other strategies.

Each strategy has its own colour and shape. The variants of a strategy, such as another number of ranks, differ in the fill of
the shape and the dash of the line. So a reader who cannot see colours can tell strategies apart by their shapes, and lines
without marks by their dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

COLOURS = 8  # number of series colours of the page, see collect/report/palette.py
SHAPES = (
    "circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "pentagon", "x", "hexagram",
    "star-square", "star-triangle-up",
)  # fmt: skip
FILLS = ("", "-open", "-dot", "-open-dot")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS_A_LINE = 6  # the most marks that a line of many points gets
MOST_STRATEGIES, MOST_VARIANTS = 24, 24  # with more than these, some looks are equal


class Look(msgspec.Struct, frozen=True):
    """The look of a cell in figures: colour, shape of its marks, and dash of its lines."""

    colour: str
    """A CSS variable of the page."""
    symbol: str = SHAPES[0]
    """plotly's name of the shape."""
    dash: str = DASHES[0]
    """plotly's name of the dash."""

    @property
    def line(self) -> dict[str, Any]:
        """The settings with which plotly draws the lines of this cell."""
        return {"color": self.colour, "dash": self.dash, "width": 2}

    def marks(self, size_px: float) -> dict[str, Any]:
        """The settings with which plotly draws the marks of this cell. size_px: the size of a mark in pixels.

        The outline is wide enough for shapes without fill.
        """
        outline = {"color": self.colour, "width": 1.5}
        return {"color": self.colour, "symbol": self.symbol, "size": size_px, "line": outline}

    @property
    def sparse_marks(self) -> dict[str, Any]:
        """The settings with which plotly draws a few marks along a line of many points.

        These marks identify the line without hiding it.
        """
        return self.marks(6) | {"maxdisplayed": MARKS_A_LINE}


def make_strategy_look(strategy_number: int, variant_number: int = 0) -> Look:
    """The look of a variant of a strategy.

    strategy_number: number of the strategy in the report, from 0. variant_number: number of the variant among the variants of
    the strategy, from 0.

    After 8 strategies the colours repeat, and the shapes and dashes are shifted so that no look repeats. After 12 variants the
    pairs of fill and dash would repeat (there are 4 fills and 6 dashes, and both numbers divide 12), so the dash is shifted
    by one.
    """
    colour_cycle = strategy_number // COLOURS
    shape_name = SHAPES[(strategy_number + colour_cycle) % len(SHAPES)]
    line_dash = DASHES[(variant_number + variant_number // 12 + colour_cycle) % len(DASHES)]
    return Look(f"var(--series-{strategy_number % COLOURS + 1})", shape_name + FILLS[variant_number % len(FILLS)], line_dash)


def choose_looks(strategy_numbers: Sequence[int]) -> list[Look]:
    """A look for each cell of a figure. strategy_numbers: for each cell, the number of its strategy.

    The n-th cell of a strategy gets the look of the n-th variant of this strategy.
    """
    count_by_strategy: Counter[int] = Counter()
    looks = []
    for strategy_number in strategy_numbers:
        looks.append(make_strategy_look(strategy_number, count_by_strategy[strategy_number]))
        count_by_strategy[strategy_number] += 1
    return looks
