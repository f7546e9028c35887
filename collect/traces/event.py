"""An event of a Chrome trace, and the exact times of events in integer nanoseconds.

Only the few fields that are used are built. Times are decimal text of microseconds: a float64 would be off by a quarter of a
microsecond in an absolute timestamp.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from msgspec import Raw, Struct, field
from numpy.typing import NDArray

UNKNOWN = np.iinfo(np.int64).min
_MOST = 1 << 61  # ns, 73 years (since 1970: until 2043): beyond it a span of starts and ends would not fit
_DIGITS = 16  # of whole us: with a 1 in front, their ns are below _MOST
_ABSENT = Raw(b"")
_POINT, _NEWLINE, _ZERO, _ONE, _NINE = map(ord, ".\n019")


class Args(Struct, gc=False):
    """correlation: joins a kernel to the call that launched it; stream: of the device. -1: not given.

    The other fields are Kineto's of a collective, as they stand in the file (collect/traces/collective.py parses them). Values
    of any type are read: a value of an unexpected type is not known, and costs nothing else.
    """

    correlation: Any = -1
    stream: Any = -1
    collective: Raw = field(name="Collective name", default=_ABSENT)
    group: Raw = field(name="Process Group Name", default=_ABSENT)
    group_id: Raw = field(name="Process Group ID", default=_ABSENT)  # instead of the name, until PyTorch 2.3
    description: Raw = field(name="Process Group Description", default=_ABSENT)
    group_size: Raw = field(name="Group size", default=_ABSENT)
    ranks: Raw = field(name="Process Group Ranks", default=_ABSENT)
    in_elements: Raw = field(name="In msg nelems", default=_ABSENT)
    out_elements: Raw = field(name="Out msg nelems", default=_ABSENT)
    dtype: Raw = _ABSENT
    sequence: Raw = field(name="Seq", default=_ABSENT)

    def collective_texts(self) -> tuple[Raw, ...]:
        """The texts of the collective, in the order of `CollectiveTexts`."""
        group = (self.group or self.group_id, self.description, self.group_size, self.ranks)
        return (self.collective, *group, self.in_elements, self.out_elements, self.dtype)


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

    All at once where every text has at most three decimals, as Kineto writes them; else one by one, with the same result.
    """
    joined = b"\n" + b"\n".join(texts)  # a Raw is a buffer
    characters = np.frombuffer(joined, np.uint8)
    begins = np.flatnonzero(characters == _NEWLINE)
    points = np.flatnonzero(characters == _POINT)
    digits = np.count_nonzero((characters >= _ZERO) & (characters <= _NINE))
    if len(texts) == len(begins) > 0 and digits + len(points) + len(begins) == len(characters):
        ends = np.append(begins[1:], len(characters))
        # The text that each point stands in; every text has one point where Kineto wrote all.
        of = np.arange(len(points)) if len(points) == len(begins) else np.searchsorted(begins, points) - 1
        decimals, whole = np.zeros((2, len(begins)), np.int64)
        decimals[of] = ends[of] - points - 1
        whole[:] = ends - begins - 1 - decimals
        whole[of] -= 1
        each = np.all((points > begins[of]) & (points < ends[of])) and np.all(np.diff(of) > 0)
        longest = characters[begins[whole == _DIGITS] + 1]  # their first digit: 1, as in stamps since 1970
        fits = whole.max() < _DIGITS or (whole.max() == _DIGITS and np.all(longest == _ONE))
        if each and whole.min() > 0 and decimals.max() <= 3 and fits:
            return np.fromstring(joined.replace(b".", b""), np.int64, sep="\n") * 10 ** (3 - decimals)
    return np.array([_one(bytes(text)) for text in texts], np.int64)


def _one(text: bytes) -> int:
    try:
        exact = Decimal(text.decode()) * 1000
        return int(exact.to_integral_value()) if abs(exact) < _MOST else UNKNOWN
    except (ArithmeticError, UnicodeDecodeError):  # no number; an exponent that no number of this machine has
        return UNKNOWN


def integers(values: Sequence[Any]) -> NDArray[np.int64]:
    """Each value as an integer, text of digits included; -1 for what is none or does not fit into 64 bits. Shape (values,)."""
    if set(map(type, values)) <= {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            pass
    return np.array([_integer(value) for value in values], np.int64)


def _integer(value: Any) -> int:
    try:
        whole = int(value) if isinstance(value, int | float | str) else -1
    except (ValueError, OverflowError):
        return -1
    return whole if -_MOST < whole < _MOST else -1
