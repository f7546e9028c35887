"""Defines the types of events in a Chrome trace, and converts the times of events to exact integer nanoseconds.

Only the fields that are used are decoded. Times are microseconds, mostly with three decimals. Decoding a time as a float64 is
fastest, and a float64 determines the nanosecond of times below 2**43 us (101 days). A larger time, such as a timestamp since
1970, would be wrong by up to a quarter of a microsecond. If a trace contains such times, the decimal text is decoded instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from msgspec import Raw, Struct, field
from numpy.typing import NDArray

UNKNOWN_NS = np.iinfo(np.int64).min
_EXACT_FLOAT_LIMIT_US = float(1 << 43)  # us; below this time, neighbouring float64 are less than 1 ns apart
_LIMIT_NS = 1 << 61  # ns, 73 years (since 1970: until 2043); the difference between two greater times could overflow
_ABSENT_TEXT = Raw(b"")


class EventArgs(Struct, gc=False):
    """The arguments of an event that has a duration."""

    values: Raw = field(name="Concrete Inputs", default=_ABSENT_TEXT)
    """The inputs of an operator that are no tensors, such as the stride of a convolution; "" for a tensor."""
    input_types: Raw = field(name="Input type", default=_ABSENT_TEXT)
    """The types of the inputs of an operator as JSON text; recorded if the profiler records shapes."""
    shapes: Raw = field(name="Input Dims", default=_ABSENT_TEXT)
    """The shapes of the inputs of an operator, such as [[8, 64], [64, 32]]; recorded if the profiler records shapes."""
    device: Any = -1
    """The number of the GPU; -1 if absent."""
    stream: Any = -1
    """The stream of the device; -1 if absent."""
    correlation: Any = -1
    """A number that a kernel and the call that launched it have in common; -1 if absent. collective to ranks: the arguments of
    a collective as JSON text (collect/traces/collective.py parses them)."""
    collective: Raw = field(name="Collective name", default=_ABSENT_TEXT)
    in_elements: Raw = field(name="In msg nelems", default=_ABSENT_TEXT)
    out_elements: Raw = field(name="Out msg nelems", default=_ABSENT_TEXT)
    group_size: Raw = field(name="Group size", default=_ABSENT_TEXT)
    dtype: Raw = _ABSENT_TEXT
    in_split: Raw = field(name="In split size", default=_ABSENT_TEXT)
    sequence: Raw = field(name="Seq", default=_ABSENT_TEXT)
    group: Raw = field(name="Process Group Name", default=_ABSENT_TEXT)
    group_id: Raw = field(name="Process Group ID", default=_ABSENT_TEXT)
    """PyTorch up to 2.3 wrote it in place of the name."""
    description: Raw = field(name="Process Group Description", default=_ABSENT_TEXT)
    ranks: Raw = field(name="Process Group Ranks", default=_ABSENT_TEXT)
    autograd: Any = field(name="Sequence number", default=-1)
    """The number that autograd gives both an operator of the forward pass and its node in the backward pass."""
    forward_thread: Any = field(name="Fwd thread id", default=0)
    """For a node of the backward pass, the number of the thread on which its operator ran. The fields are in the order in which
    Kineto writes them: msgspec then finds them faster. Values of any type are accepted, so that a value of an unexpected type
    does not make the whole event unreadable."""

    def list_collective_texts(self) -> tuple[Raw, ...]:
        """The texts of the arguments of the collective, in the order of the fields of `CollectiveArguments`."""
        group_texts = (self.group or self.group_id, self.description, self.group_size, self.ranks)
        return (self.collective, *group_texts, self.in_elements, self.out_elements, self.dtype, self.in_split)


class AnyEventArgs(EventArgs, gc=False):
    """The arguments of an event of any phase: `Args`, and the arguments of an allocation (collect/traces/details.py)."""

    bytes: Any = field(name="Bytes", default=0)
    allocated: Any = field(name="Total Allocated", default=-1)
    reserved: Any = field(name="Total Reserved", default=-1)
    device_id: Any = field(name="Device Id", default=-1)
    device_type: Any = field(name="Device Type", default=-1)


class TraceEvent(Struct, gc=False):
    """What is read of an event of a Chrome trace."""

    cat: str = ""
    """The category."""
    name: str = ""
    tid: int | str = -1
    """The thread, or the stream of a GPU."""
    ts: Any = None
    """Start in microseconds."""
    dur: Any = None
    """Duration in microseconds."""
    args: EventArgs | None = None


class AnyEvent(TraceEvent, gc=False):
    """An event of any phase (`ph`). Its times are decimal texts; an absent time is an empty text. `convert_events` checks the
    types of the names of those events that are used."""

    cat: Any = ""
    name: Any = ""
    tid: Any = -1
    ts: Raw = _ABSENT_TEXT
    dur: Raw = _ABSENT_TEXT
    ph: str = ""
    args: AnyEventArgs | None = None


class CompleteEvent(TraceEvent, gc=False, tag_field="ph", tag="X"):
    """An event that has a duration. Its times are numbers; an absent time is not a number (NaN)."""

    ts: int | float = math.nan
    dur: int | float = math.nan


class InstantEvent(TraceEvent, gc=False, tag_field="ph", tag="i"):
    """An event without a duration, such as an allocation. Its time is a number; an absent time is not a number (NaN)."""

    ts: int | float = math.nan
    args: AnyEventArgs | None = None


class _FlowStart(Struct, gc=False, tag_field="ph", tag="s"):
    pass


class _FlowEnd(Struct, gc=False, tag_field="ph", tag="f"):
    pass


class _Metadata(Struct, gc=False, tag_field="ph", tag="M"):
    pass


class _Counter(Struct, gc=False, tag_field="ph", tag="C"):
    pass


# The types of the phases that are not used have no fields, so msgspec only skips the text of such an event. Nearly half of the
# events of a trace are flows. An event of another phase is not decoded by these types, but as AnyEvent.
_UnusedEvent = _FlowStart | _FlowEnd | _Metadata | _Counter
KinetoEvent = CompleteEvent | InstantEvent | _UnusedEvent


def convert_numbers_to_ns(numbers_us: Sequence[float]) -> NDArray[np.int64] | None:
    """Convert each time in microseconds to nanoseconds. Shape (number of times,).

    Returns None if a number does not determine the nanosecond; the caller must then decode the times as texts.

    If `ns / 1000` is the same float64 as the number, a text with at most three decimals was exactly `ns` nanoseconds, because
    below _MOST_FLOAT two different texts with three decimals have different float64. A text with more decimals is rounded
    correctly below 2**42 us, where the float64 differs by less than 0.25 ns from the text and from `ns`. Between 2**42 us and
    2**43 us, the result for a text with more decimals may be wrong by 1 ns; Kineto writes three decimals.
    """
    try:
        times_us = np.array(numbers_us)
    except OverflowError:  # an integer that no float64 can hold
        return None
    if times_us.dtype == np.int64:
        return times_us * 1000 if times_us.min() * 1000.0 > -_LIMIT_NS and times_us.max() * 1000.0 < _LIMIT_NS else None
    if times_us.dtype != np.float64:  # integers that do not fit into 64 bits
        return None
    whole_us = np.floor(times_us)
    # `us * 1000` would be rounded to a neighbouring integer near 2**43 us
    times_ns = whole_us * 1000 + np.rint((times_us - whole_us) * 1000)
    is_exact = np.array_equal(times_ns / 1000, times_us) and np.abs(times_us).max(initial=0) < _EXACT_FLOAT_LIMIT_US
    return times_ns.astype(np.int64) if is_exact else None


def convert_texts_to_ns(texts_us: Sequence[Raw]) -> NDArray[np.int64]:
    """Convert each text of microseconds to nanoseconds, rounded half to even; UNKNOWN for a text that is not a number. Shape
    (number of texts,). A number in quotation marks, as torch_npu writes it, is read as the number."""
    return np.array([_convert_text_to_ns(bytes(text_us).strip(b'"')) for text_us in texts_us], np.int64)


def _convert_text_to_ns(text_us: bytes) -> int:
    digits = text_us.replace(b".", b"", 1)
    if text_us[-4:-3] == b"." and len(digits) < 19 + (digits < b"2") and digits.isdigit():  # three decimals, as Kineto writes
        return int(digits)
    try:
        exact_ns = Decimal(text_us.decode()) * 1000
        return int(exact_ns.to_integral_value()) if abs(exact_ns) < _LIMIT_NS else UNKNOWN_NS
    except (ArithmeticError, UnicodeDecodeError):  # not a number, or an exponent that is too great
        return UNKNOWN_NS


def convert_to_integers(raw_values: Sequence[Any]) -> NDArray[np.int64]:
    """Convert each value to an integer. A value may also be a text of digits. Shape (number of values,).

    The result is -1 for a value that is not a number or does not fit into 64 bits.
    """
    try:
        return np.fromiter(raw_values, np.int64, len(raw_values))  # converts each value as `int` does
    except (TypeError, ValueError, OverflowError):
        return np.array([_convert_to_integer(raw_value) for raw_value in raw_values], np.int64)


def _convert_to_integer(raw_value: Any) -> int:
    try:
        integer = int(raw_value) if isinstance(raw_value, int | float | str) else -1
    except (ValueError, OverflowError):
        return -1
    return integer if -(1 << 63) <= integer < 1 << 63 else -1
