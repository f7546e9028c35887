"""One process with the whole model and the whole batch. Every other strategy is compared with it."""

from __future__ import annotations

from shardlab.matrix.cell import Cell
from trainers.model.precision import ALL
from trainers.strategy import SWITCHES, Strategy


def refuse(cell: Cell) -> str | None:
    return None if cell.gpus == 1 else f"single is one process: found gpus: {cell.gpus}. Allowed: gpus: 1."


VARIANTS = (
    Strategy(
        name="single",
        summary="one process with the whole model and the whole batch: the reference",
        precisions=ALL,
        refuse=refuse,
        engine="trainers.engines.single",
        switches=SWITCHES,
        cuts=(),
        theory_of_communication=lambda *_: [],
    ),
)
