"""Suspensions of a run: its supervisor measures and records them; readers leave out the times of the steps that they overlap.

A run is suspended if its job is suspended or its processes are stopped. The duration of a step that overlaps a suspension says
nothing about the speed of the work: its loss is used, its duration is not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

import msgspec

from shardlab.record import Event, StepRecord

EVENT = "stood_still"
LEAST_S = 5.0  # a shorter gap between two readings of the clock may be caused by a busy machine
LOOK_S = 0.5
Pause = tuple[float, float]  # first and last moment of a suspension, in seconds since the epoch


def of(events: Iterable[Event]) -> list[Pause]:
    """The pauses in a run's events, by the clock of its supervisor, which checks twice a second.

    data of such an event: `seconds`, and `ended_s` if the event was written later than the end of the pause.
    """
    noted = ((event.data.get("ended_s", event.wall_s), event.data.get("seconds")) for event in events if event.event == EVENT)
    return [(end_s - seconds, end_s) for end_s, seconds in noted if isinstance(seconds, int | float)]


def total_s(pauses: Iterable[Pause]) -> float:
    """The total duration of the suspensions, in seconds."""
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


class SuspensionWatch:
    """Measures how long this process was suspended, and its ranks with it: its job was suspended, or somebody stopped it.

    Reads the clock twice a second in a thread of its own, so that waiting for a slow disk does not count as a suspension.
    """

    def __init__(self) -> None:
        self._lock, self._over = threading.Lock(), threading.Event()
        self._looked, self._suspended_s = time.monotonic(), 0.0

    def __enter__(self) -> SuspensionWatch:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()

    def take_s(self) -> float:
        """Seconds of suspension since the last call, including a suspension that has just ended."""
        self._look()
        with self._lock:
            suspended_s, self._suspended_s = self._suspended_s, 0.0
        return suspended_s

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            since_s, self._looked = now - self._looked, now
            if since_s >= LEAST_S:
                self._suspended_s += since_s
