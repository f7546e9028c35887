"""Measures the times of a step's parts without slowing it down: with the host's clock on a CPU, with CUDA events on a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch

DATA, FORWARD, BACKWARD, OPTIMIZER = PARTS = ("data", "forward", "backward", "optimizer")


class StepTimes(ABC):
    """The times of one step. On a GPU they are known only when the GPU has finished the step."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the times can be read without waiting for the device."""

    @abstractmethod
    def read_parts_ms(self) -> dict[str, float]:
        """Milliseconds by part (PARTS). Their sum is the time of the step. Waits until the device has finished the step."""


class Clock(ABC):
    """The clock of a rank, used for all its steps. In each step, call `start`, then `mark` at the end of each part (a part may
    occur several times), then `stop`."""

    @abstractmethod
    def start(self, *, continues: bool = False) -> None:
        """Begin a step. continues: whether the step begins at the end of the step before, and not now. The time between the two
        steps then belongs to the first part of this step, so that the sum of the step times is the whole time."""

    @abstractmethod
    def mark(self, part: str) -> None:
        """End a part: the time since the last mark, or since the start, belongs to `part`."""

    @abstractmethod
    def stop(self) -> StepTimes:
        """End the step, at the time of the last mark."""


class HostClock(Clock):
    """A clock for a CPU, with `time.perf_counter`. It is correct if the host itself computes the step."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float]] = []

    def start(self, *, continues: bool = False) -> None:
        self._marks = [self._marks[-1] if continues else ("", time.perf_counter())]

    def mark(self, part: str) -> None:
        self._marks.append((part, time.perf_counter()))

    def stop(self) -> StepTimes:
        return HostStepTimes(self._marks)


class HostStepTimes(StepTimes):
    """The times of a step that the host itself has computed."""

    def __init__(self, marks: Sequence[tuple[str, float]]) -> None:
        self._marks = marks

    def is_ready(self) -> bool:
        return True

    def read_parts_ms(self) -> dict[str, float]:
        return _sum_by_part([(part, (end - begin) * 1000) for (_, begin), (part, end) in pairwise(self._marks)])


class CudaClock(Clock):
    """A clock for a GPU, with CUDA events in its stream. Nothing waits inside a timed step, so the host can run ahead of the
    GPU as usual."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def start(self, *, continues: bool = False) -> None:
        self._marks = [self._marks[-1] if continues else ("", _record_event())]

    def mark(self, part: str) -> None:
        self._marks.append((part, _record_event()))

    def stop(self) -> StepTimes:
        return CudaStepTimes(self._marks)


class CudaStepTimes(StepTimes):
    """The times of a step by events on the stream of a GPU."""

    def __init__(self, marks: Sequence[tuple[str, torch.cuda.Event]]) -> None:
        self._marks = marks

    def is_ready(self) -> bool:
        return bool(self._marks[-1][1].query())  # type: ignore[no-untyped-call]

    def read_parts_ms(self) -> dict[str, float]:
        self._marks[-1][1].synchronize()
        return _sum_by_part([(part, begin.elapsed_time(end)) for (_, begin), (part, end) in pairwise(self._marks)])


def make_clock(device: torch.device) -> Clock:
    """The clock for a device: `CudaClock` on a GPU, else `HostClock`."""
    return CudaClock() if device.type == "cuda" else HostClock()


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _sum_by_part(part_spans: Sequence[tuple[str, float]]) -> dict[str, float]:
    ms_by_part = dict.fromkeys(PARTS, 0.0)
    for part, span_ms in part_spans:
        ms_by_part[part] += span_ms
    return ms_by_part
