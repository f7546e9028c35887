"""The shape of a transformer (layers, width, heads), from the options of a cell."""

from __future__ import annotations

from typing import cast

import msgspec

from shardlab.cell import Cell
from shardlab.registry import Option


class Shape(msgspec.Struct, frozen=True):
    """layers: number of blocks. width: of the hidden state. heads: number of attention heads; it divides the width."""

    layers: int
    width: int
    heads: int

    def options(self) -> tuple[Option, ...]:
        """The options that change the shape; their defaults are this shape."""
        return (
            Option("n_layer", self.layers, "transformer blocks", least=1),
            Option("n_embd", self.width, "width", least=1),
            Option("n_head", self.heads, "attention heads; a divisor of n_embd", least=1),
        )


def of(cell: Cell) -> Shape:
    """The shape that a cell asks for."""
    layers, width, heads = (cast("int", cell.options[name]) for name in ("n_layer", "n_embd", "n_head"))
    return Shape(layers, width, heads)


def refuse(cell: Cell) -> str | None:
    """Why no transformer has the shape that a cell asks for, as a sentence, or None."""
    shape = of(cell)
    if shape.width % shape.heads:
        return f"n_head: {shape.heads} does not divide the width of {shape.width} (n_embd). Allowed: a divisor of the width."
    return None
