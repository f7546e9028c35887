"""Pauses: periods in which a whole run stood still, as recorded by its supervisor, because its job was suspended or stopped.

The duration of a step that overlaps a pause says nothing about the speed of the work: its loss is used, its duration is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shardlab.record import Event, StepRecord

EVENT = "stood_still"
LEAST_S = 5.0  # a shorter standstill may be caused by a busy machine
Pause = tuple[float, float]  # first and last moment, in seconds since the epoch


def of(events: Iterable[Event]) -> list[Pause]:
    """The pauses in a run's events, by the clock of its supervisor, which checks twice a second.

    data of such an event: `seconds`, and `ended_s` if the event was written later than the end of the pause.
    """
    noted = ((event.data.get("ended_s", event.wall_s), event.data.get("seconds")) for event in events if event.event == EVENT)
    return [(end_s - seconds, end_s) for end_s, seconds in noted if isinstance(seconds, int | float)]


def total_s(pauses: Iterable[Pause]) -> float:
    return sum(end - begin for begin, end in pauses)


def set_aside(records: Sequence[StepRecord], pauses: Sequence[Pause]) -> Sequence[StepRecord]:
    """The records of a rank; steps that overlap a pause get `watched`, so that their times are not used."""
    if not pauses:
        return records
    return [
        msgspec.structs.replace(record, watched=True) if holds(began(record), record.wall_s, pauses) else record
        for record in records
    ]


def began(record: StepRecord) -> float:
    """The time when the step began, in seconds since the epoch."""
    return record.wall_s - record.step_ms / 1000


def holds(begin_s: float, end_s: float, pauses: Iterable[Pause]) -> bool:
    """Whether a pause overlaps this period."""
    return any(begin_s < end and begin < end_s for begin, end in pauses)
