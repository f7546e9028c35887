"""Layers, width and heads of a transformer, as a cell's options have them."""

from __future__ import annotations

from typing import cast

import msgspec

from shardlab.cell import Cell
from shardlab.errors import InputError
from shardlab.registry import Option


class Shape(msgspec.Struct, frozen=True):
    """layers: blocks. width: of the hidden state. heads: of attention; they divide the width."""

    layers: int
    width: int
    heads: int

    def options(self) -> tuple[Option, ...]:
        """The knobs that change it, with this shape as the default."""
        return (
            Option("n_layer", self.layers, "transformer blocks"),
            Option("n_embd", self.width, "width"),
            Option("n_head", self.heads, "attention heads; they divide the width"),
        )


def of(cell: Cell) -> Shape:
    """The shape that a cell asks for. Raises InputError where its heads do not divide its width."""
    layers, width, heads = (cast("int", cell.options[name]) for name in ("n_layer", "n_embd", "n_head"))
    if min(layers, width, heads) < 1:
        raise InputError(f"n_layer, n_embd, n_head: found {layers}, {width}, {heads}. Allowed: numbers from 1.")
    if width % heads:
        raise InputError(f"n_embd: {width} does not divide among {heads} heads (n_head).")
    return Shape(layers, width, heads)
