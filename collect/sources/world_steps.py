"""Joins the step records of all ranks to steps of the world, as `collect.sources.steps.join_world_steps` does, while the record
files are still growing."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.runs.record import StepRecord

MOST_INCOMPLETE_STEPS = 200_000  # the most incomplete steps in memory; there are only so many if records of a rank are missing


class WorldStep:
    """One step, joined from the records of the ranks that have recorded it so far.

    units: the sum of the units of these ranks. Ranks that share one model record the same units, which are then counted several
    times.
    """

    __slots__ = ("_units_with_loss", "_weighted_loss_sum", "rank_count", "step_ms", "step_number", "units", "wall_s", "watched")

    def __init__(self, number: int) -> None:
        self.step_number, self.rank_count, self.units, self.step_ms, self.wall_s, self.watched = (number, 0, 0, 0.0, 0.0, False)
        self._weighted_loss_sum, self._units_with_loss = 0.0, 0

    def add_record(self, record: StepRecord) -> None:
        """Add the record of one rank."""
        self.rank_count += 1
        self.units += record.units
        self.step_ms, self.wall_s = max(self.step_ms, record.step_ms), max(self.wall_s, record.wall_s)
        self.watched |= record.watched
        if record.loss is not None:
            self._weighted_loss_sum += record.loss * record.units
            self._units_with_loss += record.units

    @property
    def loss(self) -> float | None:
        """The mean loss over the global batch; None if no rank recorded a loss."""
        return self._weighted_loss_sum / self._units_with_loss if self._units_with_loss else None


class WorldSteps:
    """Collects the step records of the ranks that train, and keeps each step until every rank has recorded it."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._incomplete_steps: dict[int, WorldStep] = {}

    def add(self, records: Sequence[StepRecord]) -> list[WorldStep]:
        """Add records of one rank. Returns the timed steps that are now complete, because every rank has recorded them."""
        complete_steps = []
        for record in records:
            if record.warmup:
                continue
            world_step = self._incomplete_steps.setdefault(record.step, WorldStep(record.step))
            world_step.add_record(record)
            if world_step.rank_count == self._rank_count:
                complete_steps.append(self._incomplete_steps.pop(record.step))
            elif len(self._incomplete_steps) > MOST_INCOMPLETE_STEPS:
                del self._incomplete_steps[next(iter(self._incomplete_steps))]
        return complete_steps
