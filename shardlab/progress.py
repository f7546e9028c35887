"""How far a run is and how fast it goes, from the timed steps of one of its ranks, read one after the other."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shardlab.cell import Cell
from shardlab.record import StepRecord


class Progress(msgspec.Struct):
    """step: the last timed one; None before the first. counted: timed steps that nothing slowed down; busy_s, units: theirs."""

    step: int | None = None
    counted: int = 0
    busy_s: float = 0.0
    units: int = 0

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add the next records of the rank. Steps that were suspended or that an instrument slowed down have `watched`."""
        for record in records:
            if record.warmup:
                continue
            self.step = record.step
            if not record.watched:
                self.counted += 1
                self.busy_s += record.step_ms / 1000
                self.units += record.units

    def rate_per_s(self, cell: Cell) -> float | None:
        """Units per second of all ranks; None before the first counted step."""
        return self.units * cell.dp / self.busy_s if self.busy_s else None

    def left_s(self, cell: Cell) -> float | None:
        """Seconds until the last step; None before the first counted step, and for a cell whose length is given in epochs."""
        if not self.busy_s or cell.steps is None or self.step is None:
            return None
        return (cell.steps - self.step) * self.busy_s / self.counted
