"""Joins the step records of all ranks to steps of the world (all ranks) while the record files are still growing.

The values are the same as those of `collect.sources.steps.join_world_steps`, but no frame is built.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.runs.record import StepRecord

MOST_WAITING = 200_000  # the most incomplete steps in memory; there are only so many if records of a rank are missing


class WorldStep:
    """One step, joined from the records of the ranks that have recorded it so far.

    units: the sum of the units of these ranks. Ranks that share one model record the same units, which are then counted several
    times.
    """

    __slots__ = ("_weighed_loss", "_weight", "number", "ranks", "step_ms", "units", "wall_s", "watched")

    def __init__(self, number: int) -> None:
        self.number, self.ranks, self.units, self.step_ms, self.wall_s, self.watched = number, 0, 0, 0.0, 0.0, False
        self._weighed_loss, self._weight = 0.0, 0

    def add(self, record: StepRecord) -> None:
        """Add the record that one rank has of this step."""
        self.ranks += 1
        self.units += record.units
        self.step_ms, self.wall_s = max(self.step_ms, record.step_ms), max(self.wall_s, record.wall_s)
        self.watched |= record.watched
        if record.loss is not None:
            self._weighed_loss += record.loss * record.units
            self._weight += record.units

    @property
    def loss(self) -> float | None:
        """The mean loss over the global batch; None if no rank recorded a loss."""
        return self._weighed_loss / self._weight if self._weight else None


class WorldSteps:
    """Collects the step records of all ranks, and keeps each step until every rank has recorded it.

    ranks: the number of ranks that train.
    """

    def __init__(self, rank_count: int) -> None:
        self._ranks = rank_count
        self._waiting: dict[int, WorldStep] = {}

    def add(self, records: Sequence[StepRecord]) -> list[WorldStep]:
        """Add records of one rank. Returns the timed steps that are now complete, because every rank has recorded them."""
        complete_steps = []
        for record in records:
            if record.warmup:
                continue
            step = self._waiting.setdefault(record.step, WorldStep(record.step))
            step.add(record)
            if step.ranks == self._ranks:
                complete_steps.append(self._waiting.pop(record.step))
            elif len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
        return complete_steps
