"""Times for which a run stood still as a whole, as its supervisor notes them: its job was suspended, or stopped.

A step that holds such a time says nothing of how fast the work is: its loss counts, its time does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shardlab.record import Event, StepRecord

EVENT = "stood_still"
LEAST_S = 5.0  # what is shorter may be a busy machine
Pause = tuple[float, float]  # first and last moment, in seconds since the epoch


def of(events: Iterable[Event]) -> list[Pause]:
    """By the clock of the supervisor, which looks twice a second. data: `seconds`, and `ended_s` where it is noted later."""
    noted = ((event.data.get("ended_s", event.wall_s), event.data.get("seconds")) for event in events if event.event == EVENT)
    return [(end_s - seconds, end_s) for end_s, seconds in noted if isinstance(seconds, int | float)]


def total_s(pauses: Iterable[Pause]) -> float:
    return sum(end - begin for begin, end in pauses)


def set_aside(records: Sequence[StepRecord], pauses: Sequence[Pause]) -> Sequence[StepRecord]:
    """The records of a rank; those of steps that hold a pause are `watched`, so that their times count for nothing."""
    if not pauses:
        return records
    return [
        msgspec.structs.replace(record, watched=True) if holds(began(record), record.wall_s, pauses) else record
        for record in records
    ]


def began(record: StepRecord) -> float:
    """When the step did, in seconds since the epoch."""
    return record.wall_s - record.step_ms / 1000


def holds(begin_s: float, end_s: float, pauses: Iterable[Pause]) -> bool:
    """Whether a pause lies in this time, or a part of one."""
    return any(begin_s < end and begin < end_s for begin, end in pauses)
