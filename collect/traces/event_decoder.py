"""Decodes the JSON text of events, and converts the times of events that have a duration to exact nanoseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces.event import (
    AnyEvent,
    AnyEventArgs,
    CompleteEvent,
    InstantEvent,
    KinetoEvent,
    TraceEvent,
    convert_numbers_to_ns,
    convert_texts_to_ns,
)

MODULE_PREFIX = "nn.Module: "  # Kineto's prefix for the frame of the Python stack that calls a module
MEMORY_EVENT_NAME = "[memory]"
# Categories of events that `complete` does not contain: frames of the Python stack (very many), and the span of the profiler.
_IGNORED_CATEGORIES = frozenset({"python_function", "Trace"})
# the categories of calls of modules and of allocations
_FRAME_CATEGORY, _ALLOCATION_CATEGORY = ("python_function", "cpu_instant_event")
# phases of the Trace Event Format whose events are used or have no duration
_KNOWN_PHASES = frozenset("XiIsStfPNODMCbneRcvV(),")

_NUMBER_DECODER = msgspec.json.Decoder(list[KinetoEvent])
_TEXT_DECODER = msgspec.json.Decoder(list[AnyEvent])


class DecodedEvents(NamedTuple):
    """The events in one part of a trace file."""

    complete: Sequence[TraceEvent]
    """The events with a duration (`ph` X) whose category is not ignored, in the order of the file."""
    start_ns: NDArray[np.int64]
    """The start times of `complete`; UNKNOWN for a time that is not a number."""
    duration_ns: NDArray[np.int64]
    """The durations of `complete`; UNKNOWN for a time that is not a number."""
    modules: Sequence[TraceEvent]
    """The calls of modules, which are frames of the Python stack."""
    module_start_ns: NDArray[np.int64]
    """The start times of `modules`."""
    module_duration_ns: NDArray[np.int64]
    """The durations of `modules`."""
    memory: Sequence[AnyEventArgs]
    """The arguments of the allocations and releases."""
    memory_ns: NDArray[np.int64]
    """The time of each of `memory`."""
    lost_counts: dict[str, int]
    """{reason: number of events whose phase cannot be used for this reason}."""
    has_any_phase: bool
    """Whether any event has a phase (`ph`)."""


class EventDecoder:
    """Decodes the events of one trace file, part by part.

    Times are decoded as numbers. If numbers do not determine the times of a part, this part and all later parts are decoded
    with the times as texts. So is a part that has an event of another form than Kineto writes, such as a phase that Kineto does
    not have.
    """

    def __init__(self) -> None:
        self._reads_texts = False

    def decode(self, json_text: bytes) -> DecodedEvents:
        """Decode a JSON list of events. Raises one of DECODE_FAULTS if the text is not a list of events."""
        try:
            if not self._reads_texts:
                events = _NUMBER_DECODER.decode(json_text)
                complete_events = [event for event in events if type(event) is CompleteEvent]
                instant_events = [event for event in events if type(event) is InstantEvent]
                decoded_events = _select_events(
                    complete_events, instant_events, convert_numbers_to_ns, lost_counts={}, has_events=bool(events)
                )
                if decoded_events is not None:
                    return decoded_events
                self._reads_texts = True
        except msgspec.ValidationError:
            pass
        return convert_events(_TEXT_DECODER.decode(json_text))


def convert_events(events: Sequence[AnyEvent]) -> DecodedEvents:
    """Select the events that are used, and convert their times, which are texts, to nanoseconds. Raises ValidationError if the
    name, the category or the thread of a used event has a wrong type."""
    used_events = [event for event in events if event.ph in ("X", "i")]
    if not all(type(event.name) is type(event.cat) is str and isinstance(event.tid, int | str) for event in used_events):
        raise msgspec.ValidationError("the name of an event is not a text")
    lost_counts: Counter[str] = Counter()
    phase_counts = Counter(event.ph for event in events)
    for phase in phase_counts.keys() - _KNOWN_PHASES:
        reason = "begin and end are separate events (ph B, E)" if phase in ("B", "E") else "without a known phase (ph)"
        lost_counts[reason] += phase_counts[phase]
    decoded_events = _select_events(
        [event for event in used_events if event.ph == "X"],
        [event for event in used_events if event.ph == "i"],
        convert_texts_to_ns,
        lost_counts=lost_counts,
        has_events=any(phase_counts),
    )
    assert decoded_events is not None  # only numbers may not determine a time
    return decoded_events


def _select_events(
    complete_events: Sequence[TraceEvent],
    instant_events: Sequence[InstantEvent | AnyEvent],
    convert_to_ns: Callable[[list[Any]], NDArray[np.int64] | None],
    *,
    lost_counts: dict[str, int],
    has_events: bool,
) -> DecodedEvents | None:
    selected_events = [event for event in complete_events if event.cat not in _IGNORED_CATEGORIES]
    module_events: list[TraceEvent] = []
    if len(selected_events) < len(complete_events):
        module_events = [
            event for event in complete_events if event.cat == _FRAME_CATEGORY and event.name.startswith(MODULE_PREFIX)
        ]
    memory_events = [event for event in instant_events if event.cat == _ALLOCATION_CATEGORY and event.name == MEMORY_EVENT_NAME]
    lasting_events = [*selected_events, *module_events] if module_events else selected_events
    timed_events = [*lasting_events, *memory_events] if memory_events else lasting_events
    starts_ns = convert_to_ns([event.ts for event in timed_events])
    durations_ns = convert_to_ns([event.dur for event in lasting_events])
    if starts_ns is None or durations_ns is None:
        return None
    return DecodedEvents(
        selected_events,
        starts_ns[: len(selected_events)],
        durations_ns[: len(selected_events)],
        modules=module_events,
        module_start_ns=starts_ns[len(selected_events) : len(lasting_events)],
        module_duration_ns=durations_ns[len(selected_events) :],
        memory=[event.args or AnyEventArgs() for event in memory_events],
        memory_ns=starts_ns[len(lasting_events) :],
        lost_counts=lost_counts,
        has_any_phase=has_events,
    )


def find_impossible_times(
    device_by_event: NDArray[np.int16],
    stream_by_event: NDArray[np.int64],
    correlation: NDArray[np.int64],
    starts_ns: NDArray[np.int64],
    durations_ns: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which events start at a negative time, or at time zero although the recording began later. Shape (number of events,).

    A trace whose times count from its own start has true events at time zero. So an event at time zero counts only if the first
    event after time zero is further away than the recording is long, or if the call that launched the event starts later.
    """
    is_impossible: NDArray[np.bool_] = starts_ns < 0
    is_zero, is_after_zero = starts_ns == 0, starts_ns > 0
    if not is_zero.any() or not is_after_zero.any():
        return is_impossible
    first_later_ns = starts_ns[is_after_zero].min()
    if first_later_ns > (starts_ns + durations_ns)[is_after_zero].max() - first_later_ns:
        is_impossible |= is_zero
        return is_impossible
    is_of_gpu = (device_by_event >= 0) & (stream_by_event >= 0) & (correlation > 0)
    launched_later = np.isin(correlation, correlation[is_after_zero & ~is_of_gpu & (correlation > 0)])
    is_impossible |= is_zero & is_of_gpu & launched_later
    return is_impossible
