"""The event with which a rank records that an instrument acted between two steps, such as to save a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec

from shardlab.decoders import DECODE_FAULTS
from shardlab.record import Event
from shardlab.rundir import RunDir

EVENT = "instrument"
_WRITER = re.compile(r"rank-(\d{5,9})")


class InstrumentAct(msgspec.Struct, frozen=True):
    """What an instrument did between two steps: the data of the event.

    name: of the instrument, such as `checkpoints`. when: whether it acted before or after the timed step `step`. seconds: how
    long it took; the time of the event is its end.
    """

    name: Annotated[str, msgspec.Meta(max_length=64)]
    when: Literal["before", "after"]
    step: int
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]


class InstrumentSpan(msgspec.Struct, frozen=True):
    """The act of an instrument on one rank. end_s: seconds since the epoch, by the clock of `host`."""

    rank: int
    host: str
    end_s: float
    act: InstrumentAct


def write(run_dir: RunDir, rank: int, act: InstrumentAct) -> None:
    """Record that an instrument has just finished to act on this rank."""
    run_dir.write_event(f"rank-{rank:05d}", EVENT, sync=False, **msgspec.to_builtins(act))


def of(events: Iterable[Event]) -> Iterator[InstrumentSpan]:
    """The spans of all instruments and ranks, in the order of `events`. Events that are not of this form are left out."""
    for event in events:
        writer = _WRITER.fullmatch(event.writer)
        if event.event != EVENT or writer is None:
            continue
        try:
            act = msgspec.convert(event.data, InstrumentAct)
        except DECODE_FAULTS:
            continue
        yield InstrumentSpan(int(writer[1]), event.host, event.wall_s, act)
