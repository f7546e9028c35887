"""A file behind a number, and the place in the file: lines of records, keys of a JSON document, or events of a trace."""

from __future__ import annotations

import msgspec


class EventPlace(msgspec.Struct, frozen=True):
    """An event of a trace file, as a reader finds it in the file."""

    name: str
    """Its key `name`."""
    start_ns: int
    """Its key `ts`, in ns (the file has microseconds)."""
    duration_ns: int
    """Its key `dur`, in ns; 0 for an allocation, which has none."""


class ReadEvents(msgspec.Struct, frozen=True):
    """The events of one kind in a trace file from which a value was computed."""

    kind: str
    """Compute, collectives, memory operations, launched work, allocations, matrix products or profiler steps."""
    count: int
    """Number of events."""
    first: EventPlace
    """The event that starts first."""
    last: EventPlace
    """The event that starts last."""


class ReadFile(msgspec.Struct, frozen=True):
    """A file from which the value of a metric was computed."""

    file: str
    """Its path, relative to the workspace."""
    lines: str | None = None
    """The lines of the records that count, from 1, such as `3-12, 14`; null: the file has no records."""
    keys: list[str] = []
    """Of a JSON document: the keys that were read, such as `instruments.memory.peak_bytes`; else empty."""
    events: list[ReadEvents] = []
    """Of a trace: the events from which the value was computed; else empty."""
