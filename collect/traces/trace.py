"""Reads a profiler trace, in the format of Chrome as Kineto writes it, into columns of events. Unreadable events are counted.

No other format is read; a reader of another format would make the same `Trace`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces.collective import (
    CollectiveArguments,
    CollectiveOperation,
    is_gloo_name,
    parse_count,
    parse_gloo_span,
    parse_operation,
)
from collect.traces.details import NO_DETAILS, DetailColumns, TraceDetails
from collect.traces.event import UNKNOWN_NS, EventArgs, TraceEvent, convert_to_integers
from collect.traces.event_decoder import DecodedEvents, EventDecoder, convert_events, find_impossible_times
from collect.traces.file_kind import name_file_kind
from collect.traces.head import TraceHead, find_rank_by_groups, find_stated_rank, read_head
from collect.traces.salvage import TraceCutShort, read_blocks, salvage_events
from shardlab.files.decoders import DECODE_FAULTS

_EVENT_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST_START = re.compile(rb"\A\s*\[")
_STACK_OPTION = re.compile(rb'"with_stack"\s*:\s*(?:1|true)\b')
_BASE_TIME_KEY = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_PHASE_KEY = re.compile(rb'"ph"\s*:')
_EVENT_BOUNDARY = re.compile(rb"\}(\s*,\s*)\Z")
_SEARCHED_BYTES = 64  # this many bytes before an event are searched for the comma and the end of the previous event
_MOST_EVENT_BYTES = 16 << 20  # if no event ends within this many bytes, these bytes are treated as unreadable
_MOST_BYTES_WITHOUT_EVENT = 4 << 20  # a list without any phase (`ph`) in this many bytes is not treated as a list of events
_DEVICE_LIMIT = 1 << 15  # a number that is not smaller than this is not the number of a GPU
_NUMBER_FIELDS = ("device", "stream", "correlation")  # fields of `Args` that are numbers
_NO_ARGS = EventArgs()
_NUMBER_TYPES = (np.int32, np.int16, np.int64, np.int64, np.int32, np.int32, np.int64, np.int64, np.int64)
# operators of which the values of inputs are read, because their shapes alone do not determine their work
_OPERATORS_WITH_VALUES = re.compile("conv|attention")

# Name of a category that Kineto used until PyTorch 1.10 -> name of this category since then.
_CATEGORY_BY_OLD_NAME = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
}


class InputTexts(NamedTuple):
    """The inputs of an operator as JSON texts, each a list with one entry per input. An empty text: not recorded."""

    shapes: bytes = b""
    types: bytes = b""
    values: bytes = b""
    """The values that are no tensors, such as a stride; only of convolutions and of attention."""


class Trace(NamedTuple):
    """The events with a duration (`ph` X) of one rank, in the order of the file. Each array has one entry per event."""

    path: Path
    rank: int | None
    """The rank in the file, else the rank in the name of the file, else the rank in all its process groups, else None."""
    labels: list[str]
    """All texts of events, each once."""
    name: NDArray[np.int32]
    """Indexes in `labels`."""
    category: NDArray[np.int32]
    """Indexes in `labels`."""
    thread: NDArray[np.int32]
    """Indexes in `labels`."""
    device: NDArray[np.int16]
    """See `Args`; -1 if absent."""
    stream: NDArray[np.int64]
    """See `Args`; -1 if absent."""
    correlation: NDArray[np.int64]
    """See `Args`; -1 if absent."""
    start_ns: NDArray[np.int64]
    """The start in ns since the base time of the profiler."""
    duration_ns: NDArray[np.int64]
    """Never negative."""
    inputs: NDArray[np.int32]
    """The index in `input_texts`; 0 if the inputs are not recorded."""
    collective: NDArray[np.int32]
    """The index in `collectives` of the collective that Kineto writes for a kernel or for record_param_comms, or of a span of
    gloo whose inputs are recorded; -1 if there is none."""
    sequence: NDArray[np.int64]
    """The number that c10d gives the collective within its process group; -1 if absent."""
    collectives: list[CollectiveOperation]
    input_texts: list[InputTexts]
    """The distinct inputs of operators; the first has no texts."""
    lost_counts: dict[str, int]
    """The number of events that could not be read, by reason; in text that is not JSON, recognizable events are counted."""
    cut_reason: str
    """Why the file ends before the list of events ends; "" if the list is complete."""
    base_ns: int | None = None
    """The base time of the profiler, in ns since the epoch; None if the file does not say it."""
    head: TraceHead = TraceHead()
    """The other information before the events."""
    details: TraceDetails = NO_DETAILS
    """What only some traces have: calls of modules, memory, and numbers of autograd."""

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """The end of each event in ns, shape (number of events,)."""
        return self.start_ns + self.duration_ns

    def match_labels(self, label_indexes: NDArray[np.int32], is_wanted_label: Sequence[bool]) -> NDArray[np.bool_]:
        """Which entries of `label_indexes` have one of the wanted labels. label_indexes: indexes in `labels`. is_wanted_label:
        for each label, whether it is wanted."""
        return np.asarray(is_wanted_label, bool)[label_indexes] if len(self.labels) else np.zeros(len(label_indexes), bool)

    def has_category(self, *categories: str) -> NDArray[np.bool_]:
        """Which events have one of these categories (`cat`)."""
        return self.match_labels(self.category, [label in categories for label in self.labels])


def read_trace(path: Path) -> Trace:
    """Read a trace file block by block: the memory grows with the number of events, not with the length of their text.

    If the file is damaged or cut short, the events that can be read are returned, and `lost` and `cut` describe the rest.
    Raises OSError if the file cannot be opened.
    """
    trace_columns = _TraceColumns()
    text_around, cut_reason = b"", ""
    try:
        for text_or_events in _read_events(path, trace_columns.lost_counts):
            if isinstance(text_or_events, bytes):
                # only new text is searched: the time is linear in its length
                search_start = max(0, len(text_around) - _SEARCHED_BYTES)
                text_around += text_or_events[: _MOST_EVENT_BYTES - len(text_around)]
                trace_columns.details.collects_sequences |= _STACK_OPTION.search(text_around, search_start) is not None
            else:
                trace_columns.add_events(text_or_events)
    except TraceCutShort as cut_error:
        cut_reason = str(cut_error)
    base_time_match = _BASE_TIME_KEY.search(text_around)
    if cut_reason and trace_columns.is_empty:
        cut_reason = name_file_kind(path) or cut_reason
    loaded_trace = trace_columns.build_trace(path, find_stated_rank(text_around, path), cut_reason)
    trace_head = read_head(text_around)
    rank = loaded_trace.rank
    if rank is None:
        named_groups = [tuple(group.ranks) for group in trace_head.groups or ()]
        rank = find_rank_by_groups([*named_groups, *(operation.ranks or () for operation in loaded_trace.collectives)], path)
    return loaded_trace._replace(rank=rank, base_ns=int(base_time_match[1]) if base_time_match else None, head=trace_head)


def _read_events(path: Path, lost_counts: Counter[str]) -> Iterator[bytes | DecodedEvents]:
    """Yield the events of one block after another. The text before and after the list of events is yielded in pieces, as bytes.

    Raises TraceCutShort if the file ends before the list of events ends. lost_counts: {reason: number of lost events}; it is
    updated."""
    blocks, decoder = read_blocks(path), EventDecoder()
    undecoded_text = yield from _read_until_events(blocks)
    next_block, cut_reason = b"", ""
    bytes_without_event: int | None = 0  # bytes of the list so far, while no event was found in it; None after the first event
    while True:
        events, undecoded_text, has_ended = _decode_block(decoder, undecoded_text, next_block, lost_counts)
        yield events
        if has_ended:
            yield undecoded_text
            # The file is read to its end, because some damage of a gzip stream is only found there. Events that follow the list
            # are counted as lost.
            for block_after in blocks:
                lost_counts["after the end of the list of events"] += len(_PHASE_KEY.findall(block_after))
                yield block_after
            return
        if bytes_without_event is not None:
            bytes_without_event = None if events.has_any_phase else bytes_without_event + len(next_block)
            if bytes_without_event is not None and bytes_without_event > _MOST_BYTES_WITHOUT_EVENT:
                raise TraceCutShort("the file has no list of events: its list holds none")
        try:
            next_block = next(blocks, b"")
        except TraceCutShort as cut_error:
            next_block, cut_reason = b"", str(cut_error)
        if not next_block:
            break
    events, undecoded_text, has_ended = _decode_last_text(decoder, undecoded_text, lost_counts)
    yield events
    yield undecoded_text
    if not has_ended or cut_reason:
        raise TraceCutShort(cut_reason or "the file ends before its list of events ends")


def _read_until_events(blocks: Iterator[bytes]) -> Generator[bytes, None, bytes]:
    """Yield the text before the list of events in pieces. Returns the rest of the block in which the list begins."""
    # the end of the previous block: the start of the list may begin in one block and end in the next block
    previous_end = b""
    is_blank = True
    read_bytes = 0
    for block in blocks:
        searched_text = previous_end + block
        list_start = _EVENT_LIST_START.search(searched_text) or (_BARE_LIST_START.match(searched_text) if is_blank else None)
        if list_start:
            yield searched_text[: list_start.start()]
            return searched_text[list_start.end() :]
        if (read_bytes := read_bytes + len(block)) > _MOST_EVENT_BYTES:
            raise TraceCutShort(f"the file has no list of events in its first {_MOST_EVENT_BYTES >> 20} MiB")
        is_blank = is_blank and not searched_text.strip()
        previous_end = searched_text[-_SEARCHED_BYTES:]
        yield searched_text[:-_SEARCHED_BYTES]
    yield previous_end
    raise TraceCutShort("the file has no list of events")


def _decode_block(decoder: EventDecoder, rest: bytes, block: bytes, losses: Counter[str]) -> tuple[DecodedEvents, bytes, bool]:
    """Returns (the events that end in `rest` and `block`, the rest of the text, whether the list of events has ended).

    rest: the text before `block` that is not decoded yet."""
    last_end, next_event_start = _find_last_boundary(block)
    if last_end:
        try:
            # Decoding proves that the boundary is between two events: a boundary inside an event would not give valid JSON.
            return (decoder.decode(b"".join((b"[", rest, memoryview(block)[:last_end], b"]"))), block[next_event_start:], False)
        except DECODE_FAULTS:
            pass
    joined_text = rest + block
    if not last_end and len(joined_text) < _MOST_EVENT_BYTES:
        return convert_events([]), joined_text, False
    salvaged_events = salvage_events(joined_text, is_final=len(joined_text) >= _MOST_EVENT_BYTES)
    losses["not readable"] += salvaged_events.lost_count
    return convert_events(salvaged_events.events), joined_text[salvaged_events.rest_offset :], salvaged_events.has_ended


def _decode_last_text(decoder: EventDecoder, last_text: bytes, lost_counts: Counter[str]) -> tuple[DecodedEvents, bytes, bool]:
    """Decode the rest of the text at the end of the file. Returns (events, text behind the list of events, whether the list
    ended)."""
    try:
        list_end = last_text.rindex(b"]")
        return decoder.decode(b"[%b]" % last_text[:list_end]), last_text[list_end:], True
    except (ValueError, *DECODE_FAULTS):
        salvaged_events = salvage_events(last_text, is_final=True)
        lost_counts["not readable"] += salvaged_events.lost_count
        return convert_events(salvaged_events.events), last_text[salvaged_events.rest_offset :], salvaged_events.has_ended


def _find_last_boundary(block_text: bytes) -> tuple[int, int]:
    """The last boundary between two objects in a text: (end of the first object, start of the second object); (0, 0)
    without any."""
    object_start = len(block_text)
    while (object_start := block_text.rfind(b"{", 0, object_start)) > 0:
        window_start = max(0, object_start - _SEARCHED_BYTES)
        if match := _EVENT_BOUNDARY.search(block_text[window_start:object_start]):
            return window_start + match.start(1), object_start
    return 0, 0


class _TraceColumns:
    """Collects the columns of a trace from the events of the file, which are added block by block."""

    def __init__(self) -> None:
        self.lost_counts: Counter[str] = Counter()
        # The number of each combination (kind) of name, category and thread. A trace has few combinations, so that one look-up
        # of the combination replaces three look-ups.
        self._number_by_kind: dict[tuple[str, str, int | str], int] = {}
        self._is_gloo_kind = np.zeros(0, np.bool_)  # for each kind, whether its name is that of a span of gloo
        self._collectives: list[CollectiveOperation] = []
        self._id_by_collective: dict[CollectiveArguments | tuple[str, bytes, bytes], int] = {}
        self._id_by_input: defaultdict[InputTexts, int] = defaultdict()
        self._id_by_input.default_factory = self._id_by_input.__len__  # new texts get the next free number
        self._id_by_input[InputTexts()] = 0
        # The bytes of each column: kind, device, stream, correlation, inputs, collective, sequence, start, duration. A
        # bytearray grows in place: if the arrays of all blocks were joined at the end, columns would need their memory twice.
        self._column_bytes = [bytearray() for _ in _NUMBER_TYPES]
        self.details = DetailColumns()

    @property
    def is_empty(self) -> bool:
        """Whether no event was added."""
        return not self._number_by_kind and not self.lost_counts

    def add_events(self, events: DecodedEvents) -> None:
        self.lost_counts.update(events.lost_counts)
        if events.modules:
            self.details.add_modules(self._number_kinds(events.modules), events.module_start_ns, events.module_duration_ns)
        self.details.add_memory(events.memory, events.memory_ns)
        if not events.complete:
            return
        kind_by_event = self._number_kinds(events.complete)
        args = [event.args or _NO_ARGS for event in events.complete]
        device, stream, correlation = (convert_to_integers([getattr(arg, name) for arg in args]) for name in _NUMBER_FIELDS)
        collectives = self._find_collective_columns(args, events.complete, kind_by_event)
        device = np.where((device >= 0) & (device < _DEVICE_LIMIT), device, -1).astype(np.int16)
        event_columns: tuple[NDArray[Any], ...] = (
            *(kind_by_event, device, stream, correlation, self._number_inputs(events.complete, args)),
            *(*collectives, events.start_ns, events.duration_ns),
        )
        for column_bytes, event_column in zip(self._column_bytes, event_columns, strict=True):
            column_bytes += event_column.data
        self.details.add_operators(self._number_by_kind, kind_by_event, events.start_ns, events.duration_ns, args)

    def _number_kinds(self, events: Sequence[TraceEvent]) -> NDArray[np.int32]:
        number_by_kind = self._number_by_kind
        try:
            return np.array([number_by_kind[event.name, event.cat, event.tid] for event in events], np.int32)
        except KeyError:  # a combination gets the next number when it is first seen
            kind_numbers = [
                number_by_kind.setdefault((event.name, event.cat, event.tid), len(number_by_kind)) for event in events
            ]
            is_gloo = [is_gloo_name(event_name) for event_name, _, _ in islice(number_by_kind, len(self._is_gloo_kind), None)]
            self._is_gloo_kind = np.concatenate([self._is_gloo_kind, np.array(is_gloo, np.bool_)])
            return np.array(kind_numbers, np.int32)

    def _number_inputs(self, events: Sequence[TraceEvent], args_by_event: Sequence[EventArgs]) -> NDArray[np.int32]:
        """For each event, the number of its inputs; 0 if they are not recorded."""
        input_numbers = np.zeros(len(args_by_event), np.int32)
        for event_row, arg in [(event_row, arg) for event_row, arg in enumerate(args_by_event) if arg.shapes]:
            values_text = bytes(arg.values) if _OPERATORS_WITH_VALUES.search(events[event_row].name) else b""
            input_numbers[event_row] = self._id_by_input[InputTexts(bytes(arg.shapes), bytes(arg.input_types), values_text)]
        return input_numbers

    def _find_collective_columns(
        self, args_by_event: Sequence[EventArgs], events: Sequence[TraceEvent], kind_by_event: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """For each event, the index of its collective, and the number of the collective in its process group; -1 for no
        collective. kind_by_event: the number of each event's kind."""
        collective_ids, sequence_numbers = np.full(len(args_by_event), -1, np.int32), np.full(len(args_by_event), -1, np.int64)
        for row, arg in [(row, arg) for row, arg in enumerate(args_by_event) if arg.collective]:
            collective_ids[row] = self._find_or_add_collective(CollectiveArguments(*map(bytes, arg.list_collective_texts())))
            sequence_number = parse_count(bytes(arg.sequence))
            sequence_numbers[row] = -1 if sequence_number is None else sequence_number
        for row in np.flatnonzero(self._is_gloo_kind[kind_by_event]).tolist() if self._is_gloo_kind.any() else ():
            if (arg := args_by_event[row]).shapes:
                collective_ids[row] = self._find_or_add_collective(
                    (events[row].name, bytes(arg.shapes), bytes(arg.input_types))
                )
        return collective_ids, sequence_numbers

    def _find_or_add_collective(self, texts: CollectiveArguments | tuple[str, bytes, bytes]) -> int:
        """The index of the collective that these texts describe; -1 if they describe none.

        texts: the arguments that Kineto writes for a kernel, or the arguments of `parse_gloo_span`.
        """
        if texts not in self._id_by_collective:
            operation = parse_operation(texts) if isinstance(texts, CollectiveArguments) else parse_gloo_span(*texts)
            self._id_by_collective[texts] = -1 if operation is None else len(self._collectives)
            self._collectives += [] if operation is None else [operation]
        return self._id_by_collective[texts]

    def build_trace(self, path: Path, rank: int | None, cut_reason: str) -> Trace:
        """The trace with all complete events. Incomplete events are left out, and counted as lost."""
        columns = tuple(
            np.frombuffer(column, number_type) for column, number_type in zip(self._column_bytes, _NUMBER_TYPES, strict=True)
        )
        has_name = np.array([bool(name and category) for name, category, _ in self._number_by_kind], np.bool_)
        columns = self._drop_incomplete_events(columns, has_name[columns[0]], "without a name or category")
        columns = self._drop_incomplete_events(
            columns, (columns[-2] != UNKNOWN_NS) & (columns[-1] >= 0), "without a time or with a negative duration"
        )
        columns = self._drop_incomplete_events(
            columns, ~find_impossible_times(*columns[1:4], *columns[-2:]), "at time zero or with a negative time"
        )
        kind_by_event, device, stream, correlation, inputs, collective, sequence, start_ns, duration_ns = columns
        id_by_label: defaultdict[str, int] = defaultdict()
        id_by_label.default_factory = id_by_label.__len__
        labels_by_kind = (
            (name, _CATEGORY_BY_OLD_NAME.get(category, category), str(thread))
            for name, category, thread in self._number_by_kind
        )
        name, category, thread = (
            np.array([[id_by_label[label] for label in labels] for labels in labels_by_kind], np.int32).reshape(-1, 3).T
        )
        return Trace(
            path,
            rank,
            list(id_by_label),
            name=name[kind_by_event],
            category=category[kind_by_event],
            thread=thread[kind_by_event],
            device=device,
            stream=stream,
            correlation=correlation,
            start_ns=start_ns,
            duration_ns=duration_ns,
            inputs=inputs,
            collective=collective,
            sequence=sequence,
            collectives=self._collectives,
            input_texts=list(self._id_by_input),
            lost_counts={lost_reason: lost_count for lost_reason, lost_count in self.lost_counts.items() if lost_count},
            cut_reason=cut_reason,
            details=self.details.join_blocks(name, thread),
        )

    def _drop_incomplete_events(
        self, event_columns: tuple[NDArray[Any], ...], is_complete: NDArray[np.bool_], lost_reason: str
    ) -> tuple[NDArray[Any], ...]:
        if is_complete.all():
            return event_columns
        self.lost_counts[lost_reason] += int(np.count_nonzero(~is_complete))
        return tuple(event_column[is_complete] for event_column in event_columns)
