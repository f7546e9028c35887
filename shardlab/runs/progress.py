"""The progress and speed of a run, computed from the step records of one of its ranks as they are read."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shardlab.matrix.cell import AnyCell
from shardlab.runs.record import StepRecord


class Progress(msgspec.Struct):
    """The progress of a run, according to the step records of one of its ranks."""

    step: int | None = None
    """The number of the last timed step; None before the first timed step."""
    counted: int = 0
    """The number of timed steps whose times are used, because neither an instrument nor a suspension slowed them down."""
    busy_s: float = 0.0
    """The total duration of the counted steps, in seconds."""
    units: int = 0
    """The units of data, such as images or tokens, that the rank processed in the counted steps."""

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add the next step records of the rank. A record whose `watched` is true changes `step`, but is not counted."""
        for record in records:
            if record.warmup:
                continue
            self.step = record.step
            if not record.watched:
                self.counted += 1
                self.busy_s += record.step_ms / 1000
                self.units += record.units

    def rate_per_s(self, cell: AnyCell) -> float | None:
        """Units of data that all ranks together process per second; None before the first counted step."""
        return self.units * cell.data_ranks / self.busy_s if self.busy_s else None

    def left_s(self, cell: AnyCell) -> float | None:
        """The expected seconds until the run's last step.

        None before the first counted step, and for a cell whose length is given in epochs.
        """
        if not self.busy_s or cell.steps is None or self.step is None:
            return None
        return (cell.steps - self.step) * self.busy_s / self.counted
