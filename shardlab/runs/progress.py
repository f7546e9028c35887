"""The progress and speed of a run, computed from the step records of one of its ranks as they are read."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shardlab.matrix.cell import AnyCell
from shardlab.runs.record import StepRecord


class RunProgress(msgspec.Struct):
    """The progress of a run, according to the step records of one of its ranks."""

    last_step: int | None = None
    """The number of the last timed step; None before the first timed step."""
    counted_steps: int = 0
    """The number of timed steps whose times are used, because neither an instrument nor a suspension slowed them down."""
    busy_s: float = 0.0
    """The total duration of the counted steps, in seconds."""
    unit_count: int = 0
    """The units of data, such as images or tokens, that the rank processed in the counted steps."""

    def add_records(self, records: Iterable[StepRecord]) -> None:
        """Add the next step records of the rank. A record whose `watched` is true changes `last_step`, but is not counted."""
        for step_record in records:
            if step_record.warmup:
                continue
            self.last_step = step_record.step
            if not step_record.watched:
                self.counted_steps += 1
                self.busy_s += step_record.step_ms / 1000
                self.unit_count += step_record.units

    def compute_rate_per_s(self, cell: AnyCell) -> float | None:
        """Units of data that all ranks together process per second; None before the first counted step."""
        return self.unit_count * cell.data_ranks / self.busy_s if self.busy_s else None

    def estimate_left_s(self, cell: AnyCell) -> float | None:
        """The expected seconds until the run's last step.

        None before the first counted step, and for a cell whose length is given in epochs.
        """
        if not self.busy_s or cell.steps is None or self.last_step is None:
            return None
        return (cell.steps - self.last_step) * self.busy_s / self.counted_steps
