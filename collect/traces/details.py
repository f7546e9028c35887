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

from collect.traces.event import UNKNOWN_NS, AnyEventArgs, EventArgs, convert_to_integers

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


class _EventBlock(NamedTuple):
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
        self.collects_sequences = False
        self._is_operator = np.empty(0, np.bool_)  # for each kind of event, whether it is an operator
        self._module_blocks: list[_EventBlock] = []
        self._operator_blocks: list[_EventBlock] = []
        self._sequence_blocks: list[NDArray[np.int64]] = []
        self._memory_blocks: list[MemoryEvents] = []

    def add_operators(
        self,
        keys: Mapping[EventKey, int],
        kind_by_event: NDArray[np.int32],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
        event_args: Sequence[EventArgs],
    ) -> None:
        """Add the operators of a block to the details. Events without a time are ignored.

        keys: {kind of event: number of this kind} for all kinds that occurred so far, in the order of the numbers.
        kind_by_event: for each event of the block that has a duration, the number of its kind. start_ns, duration_ns,
        event_args: the times and the arguments of the same events."""
        if not self.collects_sequences:
            return
        is_new_operator = [category in _OPERATOR_CATEGORIES for _, category, _ in islice(keys, len(self._is_operator), None)]
        self._is_operator = np.concatenate([self._is_operator, np.array(is_new_operator, np.bool_)])
        operator_rows = _select_timed(np.flatnonzero(self._is_operator[kind_by_event]), start_ns, duration_ns)
        sequence_numbers = convert_to_integers([event_args[row].autograd for row in operator_rows.tolist()])
        operator_rows, sequence_numbers = operator_rows[sequence_numbers >= 0], sequence_numbers[sequence_numbers >= 0]
        forward_threads = convert_to_integers([event_args[row].forward_thread for row in operator_rows.tolist()])
        self._operator_blocks.append(_build_block(kind_by_event, start_ns, duration_ns, operator_rows))
        self._sequence_blocks.append(np.stack([sequence_numbers, forward_threads]))

    def add_modules(self, kinds: NDArray[np.int32], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> None:
        """Add the calls of modules in a block of events. Calls without a time are ignored."""
        module_rows = _select_timed(np.arange(len(kinds)), start_ns, duration_ns)
        self._module_blocks.append(_build_block(kinds, start_ns, duration_ns, module_rows))
        self.collects_sequences = True

    def add_memory(self, memory_args: Sequence[AnyEventArgs], moments_ns: NDArray[np.int64]) -> None:
        """Add the allocations and releases in a block of events. Those without a time or size are ignored.

        memory_args: the arguments of the allocations and releases. moments_ns: their times.
        """
        if not memory_args:
            return
        event_columns = (
            convert_to_integers([event_args.device_type for event_args in memory_args]),
            convert_to_integers([event_args.device_id for event_args in memory_args]),
            moments_ns,
            convert_to_integers([event_args.bytes for event_args in memory_args]),
            convert_to_integers([event_args.allocated for event_args in memory_args]),
            convert_to_integers([event_args.reserved for event_args in memory_args]),
        )
        is_valid = (event_columns[0] >= 0) & (event_columns[2] != UNKNOWN_NS) & (event_columns[4] >= 0)
        self._memory_blocks.append(MemoryEvents(*(column[is_valid] for column in event_columns)))

    def join_blocks(self, name_by_kind: NDArray[np.int32], thread_by_kind: NDArray[np.int32]) -> TraceDetails:
        """Join the details of all blocks. name_by_kind, thread_by_kind: for each kind of event, the index of its name and of
        its thread in the labels."""
        sequences = np.concatenate([np.empty((2, 0), np.int64), *self._sequence_blocks], axis=1)
        memory_arrays = [np.empty((6, 0), np.int64), *(np.stack(memory_block) for memory_block in self._memory_blocks)]
        return TraceDetails(
            modules=_join_event_blocks(self._module_blocks, name_by_kind, thread_by_kind),
            operators=_join_event_blocks(self._operator_blocks, name_by_kind, thread_by_kind),
            sequence_number=sequences[0],
            forward_thread=sequences[1],
            memory=MemoryEvents(*np.concatenate(memory_arrays, axis=1)),
        )


def _select_timed(rows: NDArray[np.intp], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Those of the rows whose event has a time and a duration that is not negative."""
    is_valid: NDArray[np.bool_] = (start_ns[rows] != UNKNOWN_NS) & (duration_ns[rows] >= 0)
    return rows[is_valid]


def _build_block(
    kind_by_event: NDArray[np.int32], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64], event_rows: NDArray[np.intp]
) -> _EventBlock:
    return _EventBlock(kind_by_event[event_rows], start_ns[event_rows], start_ns[event_rows] + duration_ns[event_rows])


def _join_event_blocks(event_blocks: Sequence[_EventBlock], name: NDArray[np.int32], thread: NDArray[np.int32]) -> EventSpans:
    kind_by_event = np.concatenate([np.empty(0, np.int32), *(event_block.kinds for event_block in event_blocks)])
    return EventSpans(
        name[kind_by_event],
        thread[kind_by_event],
        np.concatenate([np.empty(0, np.int64), *(event_block.start_ns for event_block in event_blocks)]),
        np.concatenate([np.empty(0, np.int64), *(event_block.end_ns for event_block in event_blocks)]),
    )


NO_DETAILS = DetailColumns().join_blocks(np.empty(0, np.int32), np.empty(0, np.int32))
