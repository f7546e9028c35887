"""Suspensions of a run: how the supervisor measures suspensions, and how readers of the records take them into account.

A run is suspended if its job is suspended or its processes are stopped. If a suspension overlaps a step, the duration of the
step says nothing about the speed of the work. Readers of the records use the loss of this step, but not its duration.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

import msgspec

from shardlab.runs.record import Event, StepRecord

SUSPENDED_EVENT = "stood_still"
MIN_SUSPENSION_S = 5.0  # the shortest suspension; a busy machine may cause a shorter gap between two readings of the clock
POLL_S = 0.5  # seconds between two readings of the clock
SuspendedSpan = tuple[float, float]  # first and last moment of a suspension, in seconds since the epoch


def read_suspensions(events: Iterable[Event]) -> list[SuspendedSpan]:
    """The suspensions that the events of a run record. The times are of the clock on the machine of the supervisor.

    Each suspension has one event of the kind SUSPENDED_EVENT. Its data contains `seconds`, the duration of the suspension.
    If the event was written some time after the suspension had ended, its data also contains `ended_s`, the end of the
    suspension in seconds since the epoch.
    """
    ends_and_durations = (
        (event.data.get("ended_s", event.wall_s), event.data.get("seconds"))
        for event in events
        if event.event == SUSPENDED_EVENT
    )
    return [(end_s - duration_s, end_s) for end_s, duration_s in ends_and_durations if isinstance(duration_s, int | float)]


def sum_durations_s(suspended_spans: Iterable[SuspendedSpan]) -> float:
    """The total duration of the suspensions, in seconds."""
    return sum(end_s - begin_s for begin_s, end_s in suspended_spans)


def mark_suspended(records: Sequence[StepRecord], suspended_spans: Sequence[SuspendedSpan]) -> Sequence[StepRecord]:
    """The step records of a rank, with `watched` set to true for each step that a suspension overlaps.

    Readers do not use the times of a step record whose `watched` is true.
    """
    if not suspended_spans:
        return records
    return [
        msgspec.structs.replace(record, watched=True)
        if overlaps_suspension(find_step_start_s(record), record.wall_s, suspended_spans)
        else record
        for record in records
    ]


def find_step_start_s(record: StepRecord) -> float:
    """The time when the step began, in seconds since the epoch."""
    return record.wall_s - record.step_ms / 1000


def overlaps_suspension(begin_s: float, end_s: float, spans: Iterable[SuspendedSpan]) -> bool:
    """Whether a suspension overlaps the period from begin_s to end_s, in seconds since the epoch."""
    return any(begin_s < suspension_end_s and suspension_begin_s < end_s for suspension_begin_s, suspension_end_s in spans)


class SuspensionWatch:
    """Measures how long this process was suspended, because its job was suspended or the process was stopped by a signal.

    When this process, the supervisor of a run, is suspended, the ranks of the run are suspended as well. A separate thread
    reads the clock twice a second, and a long gap between two readings is a suspension. The main thread could not do this,
    because the time in which it waits for a slow disk would look like a suspension.
    """

    def __init__(self) -> None:
        self._lock, self._stop_event = threading.Lock(), threading.Event()
        self._last_reading_s, self._suspended_s = time.monotonic(), 0.0

    def __enter__(self) -> SuspensionWatch:
        threading.Thread(target=self._watch_clock, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop_event.set()

    def take_suspended_s(self) -> float:
        """Seconds for which the process was suspended since the last call of `take_suspended_s`, including a suspension just
        ended."""
        self._measure_suspension()
        with self._lock:
            suspended_s, self._suspended_s = self._suspended_s, 0.0
        return suspended_s

    def _watch_clock(self) -> None:
        while not self._stop_event.wait(POLL_S):
            self._measure_suspension()

    def _measure_suspension(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            gap_s, self._last_reading_s = now_s - self._last_reading_s, now_s
            if gap_s >= MIN_SUSPENSION_S:
                self._suspended_s += gap_s
