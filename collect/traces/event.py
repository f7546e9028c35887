"""An event of a Chrome trace, and the exact times of events in integer nanoseconds.

Only the few fields that are used are built. Times are decimal text of microseconds: a float64 would be off by a quarter of a
microsecond in an absolute timestamp.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

UNKNOWN = np.iinfo(np.int64).min
_MOST = 1 << 62  # ns, 146 years: beyond it start + duration would not fit
_DIGITS = 18  # of a number that surely fits into an int64
_POINT, _NEWLINE, _ZERO, _NINE = ord("."), ord("\n"), ord("0"), ord("9")


class Args(Struct, gc=False):
    """correlation: joins a kernel to the call that launched it; stream: of the device. -1: not given."""

    correlation: int = -1
    stream: int = -1


class TraceEvent(Struct, gc=False):
    """Of any phase (`ph`). ts, dur: the decimal text of microseconds, as a float64 would round it."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = -1
    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"")
    args: Args | None = None


def nanoseconds(texts: Sequence[Raw]) -> NDArray[np.int64]:
    """Each text of microseconds as nanoseconds, digits below 1 ns rounded half to even; UNKNOWN for what is no number.

    All at once where every text is as Kineto writes them, whole or with three decimals; else one by one, with the same result.
    """
    joined = b"\n" + b"\n".join(texts)  # a Raw is a buffer
    characters = np.frombuffer(joined, np.uint8)
    begins = np.flatnonzero(characters == _NEWLINE)
    points = np.flatnonzero(characters == _POINT)
    digits = np.count_nonzero((characters >= _ZERO) & (characters <= _NINE))
    if len(texts) == len(begins) > 0 and digits + len(points) + len(begins) == len(characters):
        ends = np.append(begins[1:], len(characters))
        widths = ends - begins - 1
        least, most = widths.min(), widths.max()
        if len(points) == len(ends) and least > 4 and most <= _DIGITS and np.all(ends - points == 4):
            return np.fromstring(joined.replace(b".", b""), np.int64, sep="\n")
        if not len(points) and least > 0 and most <= _DIGITS - 3:
            return np.fromstring(joined, np.int64, sep="\n") * 1000
    return np.array([_one(bytes(text)) for text in texts], np.int64)


def _one(text: bytes) -> int:
    try:
        exact = Decimal(text.decode()) * 1000
        return int(exact.to_integral_value()) if abs(exact) < _MOST else UNKNOWN
    except (InvalidOperation, UnicodeDecodeError):
        return UNKNOWN
