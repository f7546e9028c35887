"""Decodes the JSON text of events, and converts the times of events that have a duration to exact nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces.event import ExactEvent, TraceEvent, nanoseconds

MODULE = "nn.Module: "  # Kineto's prefix for the frame of the Python stack that calls a module
MEMORY = "[memory]"
# Categories of events that `complete` does not contain: frames of the Python stack (very many), and the span of the profiler.
_UNSEEN = frozenset({"python_function", "Trace"})
_DETAILED = frozenset({"python_function", "cpu_instant_event"})  # the categories of calls of modules and of allocations
_OTHER = frozenset("iIsStfPNODMCbneRcvV(),")  # phases of the Trace Event Format whose events have no duration

_with_numbers = msgspec.json.Decoder(list[TraceEvent])
_with_texts = msgspec.json.Decoder(list[ExactEvent])


class DecodedEvents(NamedTuple):
    """The events in one part of a trace file.

    complete: the events with a duration (`ph` X) whose category is not ignored, in the order of the file.

    start_ns, duration_ns: the times of `complete`; UNKNOWN for a time that is not a number.

    modules: the calls of modules, which are frames of the Python stack. module_start_ns, module_duration_ns: their times.

    memory: the allocations and releases. memory_ns: the time of each of `memory`.

    lost: {reason: number of events whose phase cannot be used for this reason}.

    any_phase: whether any event has a phase (`ph`).
    """

    complete: Sequence[TraceEvent]
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    modules: Sequence[TraceEvent]
    module_start_ns: NDArray[np.int64]
    module_duration_ns: NDArray[np.int64]
    memory: Sequence[TraceEvent]
    memory_ns: NDArray[np.int64]
    lost: dict[str, int]
    any_phase: bool


class EventDecoder:
    """Decodes the events of one trace file, part by part.

    Times are decoded as numbers. If numbers do not determine the times of a part, this part and all later parts are decoded
    with the times as texts.
    """

    def __init__(self) -> None:
        self._exact = False

    def decode(self, text: bytes) -> DecodedEvents:
        """Decode a JSON list of events. Raises one of DECODE_FAULTS if the text is not a list of events."""
        if not self._exact:
            found = _timed(_with_numbers.decode(text))
            if found is not None:
                return found
            self._exact = True
        return timed(_with_texts.decode(text))


def timed(events: Sequence[ExactEvent]) -> DecodedEvents:
    """Select the events that are used, and convert their times to nanoseconds."""
    found = _timed(events)
    assert found is not None  # None means that times as numbers are not exact; here they are texts
    return found


def _timed(events: Sequence[TraceEvent]) -> DecodedEvents | None:
    complete = [event for event in events if event.ph == "X" and event.cat not in _UNSEEN]
    start, duration = nanoseconds([event.ts for event in complete]), nanoseconds([event.dur for event in complete])
    shorter = len(complete) < len(events)
    others = [event for event in events if event.ph != "X" or event.cat in _UNSEEN] if shorter else []
    detailed = [event for event in others if event.cat in _DETAILED]
    modules = [event for event in detailed if event.name.startswith(MODULE) and event.ph == "X"]
    memory = [event for event in detailed if event.name == MEMORY and event.ph == "i"]
    module_start, module_duration = (nanoseconds([getattr(event, name) for event in modules]) for name in ("ts", "dur"))
    moments = nanoseconds([event.ts for event in memory])
    if start is None or duration is None or module_start is None or module_duration is None or moments is None:
        return None
    lost: dict[str, int] = {}
    phases = {event.ph for event in others} - {"X"}
    for phase in phases - _OTHER:
        reason = "begin and end are separate events (ph B, E)" if phase in ("B", "E") else "without a known phase (ph)"
        lost[reason] = lost.get(reason, 0) + sum(event.ph == phase for event in others)
    return DecodedEvents(
        complete,
        start,
        duration,
        modules=modules,
        module_start_ns=module_start,
        module_duration_ns=module_duration,
        memory=memory,
        memory_ns=moments,
        lost=lost,
        any_phase=bool(complete) or any(phases),
    )
