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
    CollectiveOperation,
    CollectiveTexts,
    is_gloo_name,
    parse_count,
    parse_gloo_span,
    parse_operation,
)
from collect.traces.details import NO_DETAILS, DetailColumns, TraceDetails
from collect.traces.event import UNKNOWN_NS, Args, TraceEvent, to_integers
from collect.traces.event_decoder import DecodedEvents, EventDecoder, convert_events, find_impossible_times
from collect.traces.file_kind import name_file_kind
from collect.traces.head import TraceHead, find_rank_by_groups, find_stated_rank, read_head
from collect.traces.salvage import CutShort, read_blocks, salvage_events
from shardlab.files.decoders import DECODE_FAULTS

_EVENT_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST_START = re.compile(rb"\A\s*\[")
_WITH_STACK = re.compile(rb'"with_stack"\s*:\s*(?:1|true)\b')
_BASE_TIME = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_PHASE_KEY = re.compile(rb'"ph"\s*:')
_EVENT_BOUNDARY = re.compile(rb"\}(\s*,\s*)\Z")
_SEARCHED_BYTES = 64  # this many bytes before an event are searched for the comma and the end of the previous event
_LONGEST_EVENT = 16 << 20  # if no event ends within this many bytes, these bytes are treated as unreadable
_LONGEST_WITHOUT_EVENT = 4 << 20  # a list without any phase (`ph`) in this many bytes is not treated as a list of events
_MOST_DEVICES = 1 << 15  # a number that is not smaller than this is not the number of a GPU
_NUMBERS = ("device", "stream", "correlation")  # fields of `Args` that are numbers
_NO_ARGS = Args()
_COLUMN_TYPES = (np.int32, np.int16, np.int64, np.int64, np.int32, np.int32, np.int64, np.int64, np.int64)
# operators of which the values of inputs are read, because their shapes alone do not determine their work
_WITH_VALUES = re.compile("conv|attention")

# Name of a category that Kineto used until PyTorch 1.10 -> name of this category since then.
_OLD_CATEGORIES = {
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
    lost: dict[str, int]
    """The number of events that could not be read, by reason; in text that is not JSON, recognizable events are counted."""
    cut: str
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

    def match_labels(self, column: NDArray[np.int32], is_wanted: Sequence[bool]) -> NDArray[np.bool_]:
        """Which entries of `column` have one of the wanted labels. column: indexes in `labels`. is_wanted: for each label,
        whether it is wanted."""
        return np.asarray(is_wanted, bool)[column] if len(self.labels) else np.zeros(len(column), bool)

    def has_category(self, *categories: str) -> NDArray[np.bool_]:
        """Which events have one of these categories (`cat`)."""
        return self.match_labels(self.category, [label in categories for label in self.labels])


def read_trace(path: Path) -> Trace:
    """Read a trace file block by block: the memory grows with the number of events, not with the length of their text.

    If the file is damaged or cut short, the events that can be read are returned, and `lost` and `cut` describe the rest.
    Raises OSError if the file cannot be opened.
    """
    columns = _Columns()
    text_around, cut_reason = b"", ""
    try:
        for part in _read_events(path, columns.lost):
            if isinstance(part, bytes):
                # only new text is searched: the time is linear in its length
                search_start = max(0, len(text_around) - _SEARCHED_BYTES)
                text_around += part[: _LONGEST_EVENT - len(text_around)]
                columns.details.numbers |= _WITH_STACK.search(text_around, search_start) is not None
            else:
                columns.add(part)
    except CutShort as short:
        cut_reason = str(short)
    base_match = _BASE_TIME.search(text_around)
    if cut_reason and columns.is_empty:
        cut_reason = name_file_kind(path) or cut_reason
    loaded_trace = columns.build_trace(path, find_stated_rank(text_around, path), cut_reason)
    head = read_head(text_around)
    rank = loaded_trace.rank
    if rank is None:
        named_groups = [tuple(group.ranks) for group in head.groups or ()]
        rank = find_rank_by_groups([*named_groups, *(operation.ranks or () for operation in loaded_trace.collectives)], path)
    return loaded_trace._replace(rank=rank, base_ns=int(base_match[1]) if base_match else None, head=head)


def _read_events(path: Path, losses: Counter[str]) -> Iterator[bytes | DecodedEvents]:
    """Yield the events of one block after another. The text before and after the list of events is yielded in pieces, as bytes.

    Raises CutShort if the file ends before the list of events ends. losses: {reason: number of lost events}; it is updated.
    """
    blocks, decoder = read_blocks(path), EventDecoder()
    rest_text = yield from _read_until_events(blocks)
    block, cut_reason = b"", ""
    bytes_without_event: int | None = 0  # bytes of the list so far, while no event was found in it; None after the first event
    while True:
        events, rest_text, has_ended = _decode_block(decoder, rest_text, block, losses)
        yield events
        if has_ended:
            yield rest_text
            # The file is read to its end, because some damage of a gzip stream is only found there. Events that follow the list
            # are counted as lost.
            for block_after in blocks:
                losses["after the end of the list of events"] += len(_PHASE_KEY.findall(block_after))
                yield block_after
            return
        if bytes_without_event is not None:
            bytes_without_event = None if events.any_phase else bytes_without_event + len(block)
            if bytes_without_event is not None and bytes_without_event > _LONGEST_WITHOUT_EVENT:
                raise CutShort("the file has no list of events: its list holds none")
        try:
            block = next(blocks, b"")
        except CutShort as damage:
            block, cut_reason = b"", str(damage)
        if not block:
            break
    events, rest_text, has_ended = _decode_rest(decoder, rest_text, losses)
    yield events
    yield rest_text
    if not has_ended or cut_reason:
        raise CutShort(cut_reason or "the file ends before its list of events ends")


def _read_until_events(blocks: Iterator[bytes]) -> Generator[bytes, None, bytes]:
    """Yield the text before the list of events in pieces. Returns the rest of the block in which the list begins."""
    # the end of the previous block: the start of the list may begin in one block and end in the next block
    end_of_previous = b""
    is_blank = True
    read_bytes = 0
    for block in blocks:
        text = end_of_previous + block
        list_start = _EVENT_LIST_START.search(text) or (_BARE_LIST_START.match(text) if is_blank else None)
        if list_start:
            yield text[: list_start.start()]
            return text[list_start.end() :]
        if (read_bytes := read_bytes + len(block)) > _LONGEST_EVENT:
            raise CutShort(f"the file has no list of events in its first {_LONGEST_EVENT >> 20} MiB")
        is_blank = is_blank and not text.strip()
        end_of_previous = text[-_SEARCHED_BYTES:]
        yield text[:-_SEARCHED_BYTES]
    yield end_of_previous
    raise CutShort("the file has no list of events")


def _decode_block(decoder: EventDecoder, rest: bytes, block: bytes, losses: Counter[str]) -> tuple[DecodedEvents, bytes, bool]:
    """Returns (the events that end in `rest` and `block`, the rest of the text, whether the list of events has ended).

    rest: the text before `block` that is not decoded yet.
    """
    last_end, next_start = _find_last_boundary(block)
    if last_end:
        try:
            # Decoding proves that the boundary is between two events: a boundary inside an event would not give valid JSON.
            return decoder.decode(b"".join((b"[", rest, memoryview(block)[:last_end], b"]"))), block[next_start:], False
        except DECODE_FAULTS:
            pass
    text = rest + block
    if not last_end and len(text) < _LONGEST_EVENT:
        return convert_events([]), text, False
    salvaged_events = salvage_events(text, is_final=len(text) >= _LONGEST_EVENT)
    losses["not readable"] += salvaged_events.lost
    return convert_events(salvaged_events.events), text[salvaged_events.rest :], salvaged_events.ended


def _decode_rest(decoder: EventDecoder, text: bytes, losses: Counter[str]) -> tuple[DecodedEvents, bytes, bool]:
    """Decode the rest of the text at the end of the file. Returns (events, text behind the list of events, whether the list
    ended)."""
    try:
        end = text.rindex(b"]")
        return decoder.decode(b"[%b]" % text[:end]), text[end:], True
    except (ValueError, *DECODE_FAULTS):
        salvaged_events = salvage_events(text, is_final=True)
        losses["not readable"] += salvaged_events.lost
        return convert_events(salvaged_events.events), text[salvaged_events.rest :], salvaged_events.ended


def _find_last_boundary(text: bytes) -> tuple[int, int]:
    """The last boundary between two objects in a text: (end of the first object, start of the second object); (0, 0) without
    any."""
    start = len(text)
    while (start := text.rfind(b"{", 0, start)) > 0:
        window_start = max(0, start - _SEARCHED_BYTES)
        if match := _EVENT_BOUNDARY.search(text[window_start:start]):
            return window_start + match.start(1), start
    return 0, 0


class _Columns:
    """Collects the columns of a trace from the events of the file, which are added block by block."""

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        # The number of each combination (kind) of name, category and thread. A trace has few combinations, so that one look-up
        # of the combination replaces three look-ups.
        self._kinds: dict[tuple[str, str, int | str], int] = {}
        self._is_gloo_kind = np.zeros(0, np.bool_)  # for each kind, whether its name is that of a span of gloo
        self._collectives: list[CollectiveOperation] = []
        self._collective_ids: dict[CollectiveTexts | tuple[str, bytes, bytes], int] = {}
        self._input_ids: defaultdict[InputTexts, int] = defaultdict()
        self._input_ids.default_factory = self._input_ids.__len__  # new texts get the next free number
        self._input_ids[InputTexts()] = 0
        # The bytes of each column: kind, device, stream, correlation, inputs, collective, sequence, start, duration. A
        # bytearray grows in place: if the arrays of all blocks were joined at the end, columns would need their memory twice.
        self._bytes = [bytearray() for _ in _COLUMN_TYPES]
        self.details = DetailColumns()

    @property
    def is_empty(self) -> bool:
        """Whether no event was added."""
        return not self._kinds and not self.lost

    def add(self, events: DecodedEvents) -> None:
        self.lost.update(events.lost)
        if events.modules:
            self.details.add_modules(self._number_kinds(events.modules), events.module_start_ns, events.module_duration_ns)
        self.details.add_memory(events.memory, events.memory_ns)
        if not events.complete:
            return
        kinds = self._number_kinds(events.complete)
        args = [event.args or _NO_ARGS for event in events.complete]
        device, stream, correlation = (to_integers([getattr(arg, name) for arg in args]) for name in _NUMBERS)
        collectives = self._collective_columns(args, events.complete, kinds)
        device = np.where((device >= 0) & (device < _MOST_DEVICES), device, -1).astype(np.int16)
        columns: tuple[NDArray[Any], ...] = (
            *(kinds, device, stream, correlation, self._number_inputs(events.complete, args)),
            *(*collectives, events.start_ns, events.duration_ns),
        )
        for column_bytes, column in zip(self._bytes, columns, strict=True):
            column_bytes += column.data
        self.details.add(self._kinds, kinds, events.start_ns, events.duration_ns, args)

    def _number_kinds(self, events: Sequence[TraceEvent]) -> NDArray[np.int32]:
        number_of_kind = self._kinds
        try:
            return np.array([number_of_kind[event.name, event.cat, event.tid] for event in events], np.int32)
        except KeyError:  # a combination gets the next number when it is first seen
            kind_numbers = [
                number_of_kind.setdefault((event.name, event.cat, event.tid), len(number_of_kind)) for event in events
            ]
            is_gloo = [is_gloo_name(name) for name, _, _ in islice(number_of_kind, len(self._is_gloo_kind), None)]
            self._is_gloo_kind = np.concatenate([self._is_gloo_kind, np.array(is_gloo, np.bool_)])
            return np.array(kind_numbers, np.int32)

    def _number_inputs(self, events: Sequence[TraceEvent], args: Sequence[Args]) -> NDArray[np.int32]:
        """For each event, the number of its inputs; 0 if they are not recorded."""
        input_numbers = np.zeros(len(args), np.int32)
        for row, arg in [(row, arg) for row, arg in enumerate(args) if arg.shapes]:
            values = bytes(arg.values) if _WITH_VALUES.search(events[row].name) else b""
            input_numbers[row] = self._input_ids[InputTexts(bytes(arg.shapes), bytes(arg.input_types), values)]
        return input_numbers

    def _collective_columns(
        self, args: Sequence[Args], events: Sequence[TraceEvent], kinds: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """For each event, the index of its collective, and the number of the collective in its process group; -1 for no
        collective. kinds: the number of each event's kind."""
        collective_ids, sequence_numbers = np.full(len(args), -1, np.int32), np.full(len(args), -1, np.int64)
        for row, arg in [(row, arg) for row, arg in enumerate(args) if arg.collective]:
            collective_ids[row] = self._find_or_add_collective(CollectiveTexts(*map(bytes, arg.collective_texts())))
            sequence_number = parse_count(bytes(arg.sequence))
            sequence_numbers[row] = -1 if sequence_number is None else sequence_number
        for row in np.flatnonzero(self._is_gloo_kind[kinds]).tolist() if self._is_gloo_kind.any() else ():
            if (arg := args[row]).shapes:
                collective_ids[row] = self._find_or_add_collective(
                    (events[row].name, bytes(arg.shapes), bytes(arg.input_types))
                )
        return collective_ids, sequence_numbers

    def _find_or_add_collective(self, texts: CollectiveTexts | tuple[str, bytes, bytes]) -> int:
        """The index of the collective that these texts describe; -1 if they describe none.

        texts: the arguments that Kineto writes for a kernel, or the arguments of `parse_gloo_span`.
        """
        if texts not in self._collective_ids:
            operation = parse_operation(texts) if isinstance(texts, CollectiveTexts) else parse_gloo_span(*texts)
            self._collective_ids[texts] = -1 if operation is None else len(self._collectives)
            self._collectives += [] if operation is None else [operation]
        return self._collective_ids[texts]

    def build_trace(self, path: Path, rank: int | None, cut: str) -> Trace:
        """The trace with all complete events. Incomplete events are left out, and counted as lost."""
        columns = tuple(np.frombuffer(column, of_type) for column, of_type in zip(self._bytes, _COLUMN_TYPES, strict=True))
        has_name = np.array([bool(name and category) for name, category, _ in self._kinds], np.bool_)
        columns = self._drop_incomplete(columns, has_name[columns[0]], "without a name or category")
        columns = self._drop_incomplete(
            columns, (columns[-2] != UNKNOWN_NS) & (columns[-1] >= 0), "without a time or with a negative duration"
        )
        columns = self._drop_incomplete(
            columns, ~find_impossible_times(*columns[1:4], *columns[-2:]), "at time zero or with a negative time"
        )
        kinds, device, stream, correlation, inputs, collective, sequence, start, duration = columns
        label_ids: defaultdict[str, int] = defaultdict()
        label_ids.default_factory = label_ids.__len__
        kind_labels = ((name, _OLD_CATEGORIES.get(category, category), str(thread)) for name, category, thread in self._kinds)
        name, category, thread = (
            np.array([[label_ids[label] for label in labels] for labels in kind_labels], np.int32).reshape(-1, 3).T
        )
        return Trace(
            path,
            rank,
            list(label_ids),
            name=name[kinds],
            category=category[kinds],
            thread=thread[kinds],
            device=device,
            stream=stream,
            correlation=correlation,
            start_ns=start,
            duration_ns=duration,
            inputs=inputs,
            collective=collective,
            sequence=sequence,
            collectives=self._collectives,
            input_texts=list(self._input_ids),
            lost={reason: count for reason, count in self.lost.items() if count},
            cut=cut,
            details=self.details.join_blocks(name, thread),
        )

    def _drop_incomplete(
        self, columns: tuple[NDArray[Any], ...], is_complete: NDArray[np.bool_], reason: str
    ) -> tuple[NDArray[Any], ...]:
        if is_complete.all():
            return columns
        self.lost[reason] += int(np.count_nonzero(~is_complete))
        return tuple(column[is_complete] for column in columns)
