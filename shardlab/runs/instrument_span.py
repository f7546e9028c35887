"""The event with which a rank records what an instrument did between two steps, for example that it saved a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec

from shardlab.files.decoders import DECODE_FAULTS
from shardlab.record_types import Count
from shardlab.runs.record import Event
from shardlab.runs.rundir import RunDir

INSTRUMENT_EVENT = "instrument"
_RANK_WRITER = re.compile(r"rank-(\d{5,9})")


class InstrumentAct(msgspec.Struct, frozen=True):
    """What an instrument did between two steps: the data of the event."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    """The name of the instrument, such as `checkpoints`."""
    when: Literal["before", "after"]
    """Whether the instrument acted before or after the timed step `step`."""
    step: Count
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
    """The duration of the act; the time of the event is the end of the act."""


class InstrumentSpan(msgspec.Struct, frozen=True):
    """The act of an instrument on one rank."""

    rank: int
    host: str
    end_s: float
    """Seconds since the epoch, by the clock of `host`."""
    act: InstrumentAct


def write_span(run_dir: RunDir, rank: int, instrument_act: InstrumentAct) -> None:
    """Record the act of an instrument that has just ended on this rank."""
    run_dir.write_event(f"rank-{rank:05d}", INSTRUMENT_EVENT, sync=False, **msgspec.to_builtins(instrument_act))


def read_spans(events: Iterable[Event]) -> Iterator[InstrumentSpan]:
    """The spans of all instruments and ranks, in the order of `events`. Events that are not of this form are left out."""
    for event in events:
        writer_match = _RANK_WRITER.fullmatch(event.writer)
        if event.event != INSTRUMENT_EVENT or writer_match is None:
            continue
        try:
            instrument_act = msgspec.convert(event.data, InstrumentAct)
        except DECODE_FAULTS:
            continue
        yield InstrumentSpan(int(writer_match[1]), event.host, event.wall_s, instrument_act)
