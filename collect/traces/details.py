"""Collects the data of a trace that the profiler records only on request: calls of modules, and memory.

It also collects the sequence numbers of autograd. An operator of the forward pass has the same sequence number as the node of
autograd that computes its gradient in the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces.event import UNKNOWN_NS, AnyArgs, Args, to_integers

_OPERATOR_CATEGORIES = ("cpu_op", "Operator")  # the category of operators today, and its name until PyTorch 1.10
EventKey = tuple[str, str, int | str]  # name, category and thread of an event


class EventSpans(NamedTuple):
    """Events that have a duration, as arrays with one entry per event."""

    name: NDArray[np.int32]
    """The index of the name in the labels of the trace."""
    thread: NDArray[np.int32]
    """The index of the thread in the labels of the trace."""
    start_ns: NDArray[np.int64]
    """Start in ns."""
    end_ns: NDArray[np.int64]
    """End in ns."""

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> EventSpans:
        """The chosen events. rows: which events are chosen, as a boolean mask or as indexes."""
        return EventSpans(self.name[rows], self.thread[rows], self.start_ns[rows], self.end_ns[rows])


class MemoryEvents(NamedTuple):
    """The allocations and releases that the profiler recorded, one entry per event."""

    device_type: NDArray[np.int64]
    """The number of the type of the device in c10 (c10/core/DeviceType.h)."""
    device_number: NDArray[np.int64]
    """The number of the device."""
    at_ns: NDArray[np.int64]
    """The time."""
    size_bytes: NDArray[np.int64]
    """The size; negative for a release."""
    allocated_bytes: NDArray[np.int64]
    """The allocated bytes of the device after the event."""
    reserved_bytes: NDArray[np.int64]
    """The reserved bytes of the device after the event."""


class TraceDetails(NamedTuple):
    """The details of a trace. A field is empty if the profiler did not record its data."""

    modules: EventSpans
    """The calls of modules."""
    operators: EventSpans
    """The operators that have a sequence number of autograd."""
    sequence_number: NDArray[np.int64]
    """The sequence number of each of `operators`."""
    forward_thread: NDArray[np.int64]
    """For each of `operators` that is a node of the backward pass, the number of the thread of its forward pass; 0 for an
    operator of the forward pass."""
    memory: MemoryEvents
    """The allocations and releases of memory."""


class _Part(NamedTuple):
    """Some events of one block of a trace file."""

    kinds: NDArray[np.int32]
    """For each event, the number of its kind (combination of name, category and thread)."""
    start_ns: NDArray[np.int64]
    """Start in ns."""
    end_ns: NDArray[np.int64]
    """End in ns."""


class DetailColumns:
    """Collects the details of a trace from one block of events after another.

    numbers: whether to collect the sequence numbers of autograd. To read them takes time, and they are only used if the trace
    has calls of modules.
    """

    def __init__(self) -> None:
        self.numbers = False
        self._is_operator = np.empty(0, np.bool_)  # for each kind of event, whether it is an operator
        self._modules: list[_Part] = []
        self._operators: list[_Part] = []
        self._sequences: list[NDArray[np.int64]] = []
        self._memory: list[MemoryEvents] = []

    def add(
        self,
        keys: Mapping[EventKey, int],
        kinds: NDArray[np.int32],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
        args: Sequence[Args],
    ) -> None:
        """Add the operators of a block to the details. Events without a time are ignored.

        keys: {kind of event: number of this kind} for all kinds that occurred so far, in the order of the numbers. kinds: for
        each event of the block that has a duration, the number of its kind. start_ns, duration_ns, args: the times and the
        arguments of the same events.
        """
        if not self.numbers:
            return
        new_kinds = [category in _OPERATOR_CATEGORIES for _, category, _ in islice(keys, len(self._is_operator), None)]
        self._is_operator = np.concatenate([self._is_operator, np.array(new_kinds, np.bool_)])
        operator_rows = _select_timed(np.flatnonzero(self._is_operator[kinds]), start_ns, duration_ns)
        sequence_numbers = to_integers([args[row].autograd for row in operator_rows.tolist()])
        operator_rows, sequence_numbers = operator_rows[sequence_numbers >= 0], sequence_numbers[sequence_numbers >= 0]
        forward_threads = to_integers([args[row].forward_thread for row in operator_rows.tolist()])
        self._operators.append(_build_part(kinds, start_ns, duration_ns, operator_rows))
        self._sequences.append(np.stack([sequence_numbers, forward_threads]))

    def add_modules(self, kinds: NDArray[np.int32], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> None:
        """Add the calls of modules in a block of events. Calls without a time are ignored."""
        module_rows = _select_timed(np.arange(len(kinds)), start_ns, duration_ns)
        self._modules.append(_build_part(kinds, start_ns, duration_ns, module_rows))
        self.numbers = True

    def add_memory(self, memory_args: Sequence[AnyArgs], moments_ns: NDArray[np.int64]) -> None:
        """Add the allocations and releases in a block of events. Those without a time or size are ignored.

        memory_args: the arguments of the allocations and releases. moments_ns: their times.
        """
        if not memory_args:
            return
        columns = (
            to_integers([arg.device_type for arg in memory_args]),
            to_integers([arg.device_id for arg in memory_args]),
            moments_ns,
            to_integers([arg.bytes for arg in memory_args]),
            to_integers([arg.allocated for arg in memory_args]),
            to_integers([arg.reserved for arg in memory_args]),
        )
        is_valid = (columns[0] >= 0) & (columns[2] != UNKNOWN_NS) & (columns[4] >= 0)
        self._memory.append(MemoryEvents(*(column[is_valid] for column in columns)))

    def join_blocks(self, name: NDArray[np.int32], thread: NDArray[np.int32]) -> TraceDetails:
        """Join the details of all blocks. name, thread: for each kind of event, the index of its name and of its thread in
        the labels."""
        sequences = np.concatenate([np.empty((2, 0), np.int64), *self._sequences], axis=1)
        memory_parts = [np.empty((6, 0), np.int64), *(np.stack(part) for part in self._memory)]
        return TraceDetails(
            modules=_join_parts(self._modules, name, thread),
            operators=_join_parts(self._operators, name, thread),
            sequence_number=sequences[0],
            forward_thread=sequences[1],
            memory=MemoryEvents(*np.concatenate(memory_parts, axis=1)),
        )


def _select_timed(rows: NDArray[np.intp], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Those of the rows whose event has a time and a duration that is not negative."""
    is_valid: NDArray[np.bool_] = (start_ns[rows] != UNKNOWN_NS) & (duration_ns[rows] >= 0)
    return rows[is_valid]


def _build_part(
    kinds: NDArray[np.int32], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64], rows: NDArray[np.intp]
) -> _Part:
    return _Part(kinds[rows], start_ns[rows], start_ns[rows] + duration_ns[rows])


def _join_parts(parts: Sequence[_Part], name: NDArray[np.int32], thread: NDArray[np.int32]) -> EventSpans:
    kinds = np.concatenate([np.empty(0, np.int32), *(part.kinds for part in parts)])
    return EventSpans(
        name[kinds],
        thread[kinds],
        np.concatenate([np.empty(0, np.int64), *(part.start_ns for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.end_ns for part in parts)]),
    )


NO_DETAILS = DetailColumns().join_blocks(np.empty(0, np.int32), np.empty(0, np.int32))
