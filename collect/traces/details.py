"""Collects the details of a trace that only some traces have: calls of modules, memory, shapes, and numbers of autograd."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces.event import UNKNOWN, Args, TraceEvent, integers, nanoseconds

MODULE = "nn.Module: "  # Kineto's prefix for the frame of the Python stack that calls a module
PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"})
_OPERATORS = ("cpu_op", "Operator")  # the categories of operators, today and until PyTorch 1.10
_MEMORY = "[memory]"
_NO_ARGS = Args()
_PLAIN, _MODULE, _PRODUCT = range(3)


class Spans(NamedTuple):
    """Events with a thread and a time, one entry per event. name, thread: indexes in the labels of the trace. Times in ns."""

    name: NDArray[np.int32]
    thread: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]

    def only(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Spans:
        """The chosen events. rows: a boolean mask, or indexes."""
        return Spans(self.name[rows], self.thread[rows], self.start_ns[rows], self.end_ns[rows])


class MemoryEvents(NamedTuple):
    """The allocations and releases that the profiler recorded, one entry per event.

    device_type: the number of the type of the device in c10 (c10/core/DeviceType.h). device: the number of the device.
    at_ns: the time. bytes: the size; negative for a release. allocated, reserved: the bytes of the device after the event.
    """

    device_type: NDArray[np.int64]
    device: NDArray[np.int64]
    at_ns: NDArray[np.int64]
    bytes: NDArray[np.int64]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]


class TraceDetails(NamedTuple):
    """The details of a trace. What the profiler did not record is empty.

    modules: the calls of modules. products: the operators of matrix products whose shapes are recorded.
    shapes: for each of `products` the index of its shapes in `texts`. texts: the JSON text of each distinct list of shapes, the
    empty text first.
    operators: the operators that have a number of autograd; an operator of forward has the same number as its node in backward.
    sequence: these numbers. forward_thread: for a node of backward the number of the thread of its forward; 0 for an operator.
    """

    modules: Spans
    products: Spans
    shapes: NDArray[np.int32]
    texts: list[bytes]
    operators: Spans
    sequence: NDArray[np.int64]
    forward_thread: NDArray[np.int64]
    memory: MemoryEvents


class DetailColumns:
    """Collects the details from one block of events after another.

    numbers: whether to collect the numbers of autograd. They are only used together with modules, and reading them takes time.
    """

    def __init__(self) -> None:
        self.numbers = False
        self._kinds = np.empty(0, np.int8)  # for each label of the trace: _MODULE, _PRODUCT or _PLAIN
        self._modules: list[Spans] = []
        self._products: list[Spans] = []
        self._shapes: list[NDArray[np.int32]] = []
        self._texts: defaultdict[bytes, int] = defaultdict()
        self._texts.default_factory = self._texts.__len__  # a text gets the next number when it is first seen
        self._texts[b""] = 0  # no shapes
        self._operators: list[Spans] = []
        self._sequences: list[NDArray[np.int64]] = []
        self._memory: list[MemoryEvents] = []

    def add(
        self,
        labels: Mapping[str | int, int],
        spans: Spans,
        args: Sequence[Args | None],
        category: NDArray[np.int32],
    ) -> None:
        """Add the events with a duration of a block.

        labels: the number of each label so far, in the order of the numbers. category: for each event the number of its
        category. An end before the start marks an event without a time; it is ignored.
        """
        if len(labels) > len(self._kinds):
            new = [_kind(label) for label in islice(labels, len(self._kinds), None)]
            self._kinds = np.concatenate([self._kinds, np.array(new, np.int8)])
        good = (spans.start_ns != UNKNOWN) & (spans.end_ns >= spans.start_ns)
        kind = np.where(good, self._kinds[spans.name], _PLAIN)
        if (kind == _MODULE).any():
            self._modules.append(spans.only(kind == _MODULE))
            self.numbers = True
        rows = np.flatnonzero(kind == _PRODUCT)
        if len(rows):
            texts = self._texts
            shapes = np.array([texts[bytes((args[row] or _NO_ARGS).shapes)] for row in rows.tolist()], np.int32)
            self._products.append(spans.only(rows[shapes > 0]))
            self._shapes.append(shapes[shapes > 0])
        if self.numbers:
            is_operator = np.isin(category, [labels[name] for name in _OPERATORS if name in labels])
            rows = np.flatnonzero(good & is_operator)
            of = [args[row] or _NO_ARGS for row in rows.tolist()]
            sequences = integers([arg.autograd for arg in of])
            has = sequences >= 0
            threads = integers([arg.forward_thread for arg in of])[has]
            self._operators.append(spans.only(rows[has]))
            self._sequences.append(np.stack([sequences[has], threads]))

    def add_memory(self, events: Sequence[TraceEvent]) -> None:
        """Add the allocations among the events of a block that have no duration. Events without a time or size are ignored."""
        found = [(event, event.args) for event in events if event.name == _MEMORY and event.args is not None]
        if not found:
            return
        columns = (
            integers([arg.device_type for _, arg in found]),
            integers([arg.device for _, arg in found]),
            nanoseconds([event.ts for event, _ in found]),
            integers([arg.bytes for _, arg in found]),
            integers([arg.allocated for _, arg in found]),
            integers([arg.reserved for _, arg in found]),
        )
        good = (columns[0] >= 0) & (columns[2] != UNKNOWN) & (columns[4] >= 0)
        self._memory.append(MemoryEvents(*(column[good] for column in columns)))

    def details(self) -> TraceDetails:
        """The details of all blocks together."""
        sequences = np.concatenate([np.empty((2, 0), np.int64), *self._sequences], axis=1)
        parts = [np.empty((6, 0), np.int64), *(np.stack(part) for part in self._memory)]
        return TraceDetails(
            modules=_joined(self._modules),
            products=_joined(self._products),
            shapes=np.concatenate([np.empty(0, np.int32), *self._shapes]),
            texts=list(self._texts),
            operators=_joined(self._operators),
            sequence=sequences[0],
            forward_thread=sequences[1],
            memory=MemoryEvents(*np.concatenate(parts, axis=1)),
        )


def _kind(label: str | int) -> int:
    if not isinstance(label, str):
        return _PLAIN
    return _MODULE if label.startswith(MODULE) else _PRODUCT if label in PRODUCTS else _PLAIN


def _joined(parts: Sequence[Spans]) -> Spans:
    return Spans(
        np.concatenate([np.empty(0, np.int32), *(part.name for part in parts)]),
        np.concatenate([np.empty(0, np.int32), *(part.thread for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.start_ns for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.end_ns for part in parts)]),
    )


NO_DETAILS = DetailColumns().details()
