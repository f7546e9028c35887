"""An event of a Chrome trace: the few fields that are looked at; the rest is skipped without being built."""

from __future__ import annotations

from msgspec import Raw, Struct


class Args(Struct, gc=False):
    """correlation: joins a kernel to the call that launched it; stream: of the device. -1: not given."""

    correlation: int = -1
    stream: int = -1


class Event(Struct, gc=False):
    """Of any phase (`ph`). ts, dur: the decimal text of microseconds, as a float64 would round it."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = -1
    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"")
    args: Args | None = None
