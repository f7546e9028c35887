"""Streams and events of fake GPUs. All work runs synchronously, so no call ever waits."""

from __future__ import annotations

import time
from typing import Any

import torch

from fake_cuda import waits


class Event:
    """An event of a stream. It stores the time of the host at which it was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed, self._at_s = enable_timing, None

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        waits.note("synchronize an event")

    def elapsed_time(self, end: Event) -> float:
        """The time between two events in ms. Raises RuntimeError in the same cases as a real event."""
        if not (self._timed and end._timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._at_s is None or end._at_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._at_s - self._at_s) * 1000


class Stream(torch.Stream):
    """A stream of a GPU. The work of all streams runs in the order in which the host launches it."""

    cuda_stream = 0

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, device=torch.device("cuda", torch.cuda._utils._get_device_index(device, optional=True)))

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waits.note("synchronize a stream")


class StreamContext:
    """The context manager for `with torch.cuda.stream(...)`; it does nothing."""

    def __init__(self, stream: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def install() -> None:
    current: dict[int, Stream] = {}

    def current_stream(device: Any = None) -> Stream:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        if index not in current:
            current[index] = Stream(torch.device("cuda", index))
        return current[index]

    torch.cuda.Event = torch.cuda.streams.Event = Event
    torch.cuda.Stream = torch.cuda.streams.Stream = Stream
    torch.cuda.current_stream = torch.cuda.default_stream = current_stream
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.stream = torch.cuda.StreamContext = StreamContext
