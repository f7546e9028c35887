"""Times the parts of a step without slowing it down: with the host's clock on a CPU, with CUDA events on a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch

DATA, FORWARD, BACKWARD, OPTIMIZER = PARTS = ("data", "forward", "backward", "optimizer")


class Reading(ABC):
    """The times of one step; on a GPU they are known only when the GPU has come to the step's end."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the times can be read without waiting for the device."""

    @abstractmethod
    def parts_ms(self) -> dict[str, float]:
        """Milliseconds by part; waits for the device where it has to. Their sum is the step's time."""


class Clock(ABC):
    """The clock of a rank for all steps: start it, mark the end of each part (a part may occur several times), stop it."""

    @abstractmethod
    def start(self, *, goes_on: bool = False) -> None:
        """Begin a step now or, with goes_on, at the end of the step before. The time between the two steps then belongs to the
        first part of this step, so that the step times add up to the whole time."""

    @abstractmethod
    def mark(self, part: str) -> None:
        """The time since the mark before (or the start) belongs to `part`."""

    @abstractmethod
    def stop(self) -> Reading:
        """The step ended with the last mark."""


class HostClock(Clock):
    """`time.perf_counter`: right where the host itself computes, as on a CPU."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float]] = []

    def start(self, *, goes_on: bool = False) -> None:
        self._marks = [self._marks[-1] if goes_on else ("", time.perf_counter())]

    def mark(self, part: str) -> None:
        self._marks.append((part, time.perf_counter()))

    def stop(self) -> Reading:
        return HostReading(self._marks)


class HostReading(Reading):
    def __init__(self, marks: Sequence[tuple[str, float]]) -> None:
        self._marks = marks

    def ready(self) -> bool:
        return True

    def parts_ms(self) -> dict[str, float]:
        return _by_part([(part, (end - begin) * 1000) for (_, begin), (part, end) in pairwise(self._marks)])


class CudaClock(Clock):
    """CUDA events in the GPU's stream: nothing waits inside a timed step, so the host can run ahead of the GPU as usual."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def start(self, *, goes_on: bool = False) -> None:
        self._marks = [self._marks[-1] if goes_on else ("", _event())]

    def mark(self, part: str) -> None:
        self._marks.append((part, _event()))

    def stop(self) -> Reading:
        return CudaReading(self._marks)


class CudaReading(Reading):
    def __init__(self, marks: Sequence[tuple[str, torch.cuda.Event]]) -> None:
        self._marks = marks

    def ready(self) -> bool:
        return bool(self._marks[-1][1].query())  # type: ignore[no-untyped-call]

    def parts_ms(self) -> dict[str, float]:
        self._marks[-1][1].synchronize()
        return _by_part([(part, begin.elapsed_time(end)) for (_, begin), (part, end) in pairwise(self._marks)])


def clock_for(device: torch.device) -> Clock:
    """The clock that is right on this device."""
    return CudaClock() if device.type == "cuda" else HostClock()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _by_part(spans: Sequence[tuple[str, float]]) -> dict[str, float]:
    times = dict.fromkeys(PARTS, 0.0)
    for part, span_ms in spans:
        times[part] += span_ms
    return times
