"""Reads as much as possible of the file of a trace that is cut short or damaged: its text in blocks, and single events."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from collect.traces.event import Args, TraceEvent

BLOCK = 1 << 18  # bytes: what is decoded at once fits the second-level cache, which made it a quarter faster than 4 MiB
_GZIP = b"\x1f\x8b"
_BETWEEN = re.compile(r"[\s,]*")
_LIST_END = re.compile(r"\]\s*(?:\}|,\s*\"|\Z)")
_NEXT = re.compile(r"\}\s*,\s*(?=\{)")
_PHASE = re.compile(r"\"ph\"\s*:")
_TEXTS = {one.name: one.encode_name for one in msgspec.structs.fields(Args) if one.type is Raw}
_BARE = re.compile(r"(:\s*)(-?)(?:inf|nan)(?=\s*[,}\]])")  # as C's printf writes what is not finite


class CutShort(Exception):
    """Nothing further can be had of a file; the sentence says why."""


def blocks(path: Path) -> Iterator[bytes]:
    """The text in blocks of at most BLOCK bytes. Raises CutShort after all that could be had; OSError as open does."""
    with path.open("rb") as file:
        gzipped = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        raw = iter(lambda: file.read(BLOCK), b"")
        yield from _inflated(raw) if gzipped else raw


def _inflated(raw: Iterator[bytes]) -> Iterator[bytes]:
    """What gzipped blocks hold; members that stand one behind the other are one text."""
    member, ended = zlib.decompressobj(wbits=31), False
    for block in raw:
        while block:
            if ended and not (block := block.lstrip(b"\0")):  # zeros may fill the last block of a tape
                break
            if ended:
                member, ended = zlib.decompressobj(wbits=31), False
            before = member.copy()
            try:
                text = member.decompress(block, BLOCK)
            except zlib.error as error:
                if text := _until_damage(before, block):  # an empty block would say that the file ends here
                    yield text
                raise CutShort(f"its gzip stream is damaged ({error})") from None
            if text:
                yield text
            ended = member.eof
            block = member.unused_data if ended else member.unconsumed_tail
    if not ended:
        raise CutShort("its gzip stream ends too early")


def _until_damage(member: zlib._Decompress, block: bytes) -> bytes:
    """What a damaged block gives byte by byte: zlib throws away the output of a call that fails."""
    text = bytearray()
    for index in range(len(block)):
        try:
            text += member.decompress(block[index : index + 1])
        except zlib.error:
            break
    return bytes(text)


class _Number(str):
    """The decimal text of a number, told from a string."""


class Salvaged(NamedTuple):
    """rest: the offset of what may become readable with more text; ended: the list of events is complete."""

    events: list[TraceEvent]
    lost: int
    rest: int
    ended: bool


# strict: a control character in a string costs the event, as a hole of zeros could join two events into one otherwise.
_decoder = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_Number, strict=True)


def salvage(raw: bytes, *, final: bool) -> Salvaged:
    """The events of a stretch that begins where an event may begin. final: no more text will come.

    An event that is not JSON costs itself alone: reading goes on at the next place where an object follows another and reads
    as an event. lost counts the phases that stand in what was passed over, at least one each time.
    """
    text = raw.decode("utf-8", "surrogateescape")  # what is not UTF-8 becomes characters that encode to the same bytes
    text = _BARE.sub(lambda found: found[1] + " " * len(found[2]) + "NaN", text)
    events: list[TraceEvent] = []
    lost, at = 0, 0

    def salvaged(*, ended: bool) -> Salvaged:
        return Salvaged(events, lost, len(text[:at].encode("utf-8", "surrogateescape")), ended)

    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # matches nothing too
        if _LIST_END.match(text, at) and not _PHASE.search(text, at):  # else it is the end of a list within a lost event
            return salvaged(ended=True)
        if at == len(text):
            return salvaged(ended=False)
        found = _object(text, at)
        if found:
            fields, at = found
            events.append(_event(fields))
            continue
        following = _resume(text, at)
        if following is None and not final:
            return salvaged(ended=False)
        end = len(text) if following is None else following
        lost += max(1, len(_PHASE.findall(text, at, end)))
        at = end


def _object(text: str, at: int) -> tuple[dict[str, Any], int] | None:
    try:
        fields, end = _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return (fields, end) if isinstance(fields, dict) else None


def _resume(text: str, at: int) -> int | None:
    """Where the next event begins that can be read, or None."""
    for match in _NEXT.finditer(text, at):
        found = _object(text, match.end())
        if found and type(found[0].get("ph")) is str:
            return match.end()
    return None


def _event(fields: dict[str, Any]) -> TraceEvent:
    args = fields.get("args")
    tid = fields.get("tid", -1)
    return TraceEvent(
        ph=_text(fields.get("ph")),
        cat=_text(fields.get("cat")),
        name=_text(fields.get("name")),
        tid=str(tid) if isinstance(tid, _Number) else _text(tid),
        ts=_raw(fields.get("ts")),
        dur=_raw(fields.get("dur")),
        args=_args(args) if isinstance(args, dict) else None,
    )


def _args(fields: dict[str, Any]) -> Args:
    texts = {name: _json(fields[key]) for name, key in _TEXTS.items() if key in fields}
    return Args(_plain(fields.get("correlation", -1)), _plain(fields.get("stream", -1)), **texts)


def _json(value: Any) -> Raw:
    """The JSON text of a string, a number or a list of them; nothing for anything else."""
    if isinstance(value, list):
        return Raw(b"[%b]" % b",".join(_json(one) for one in value))
    return Raw(msgspec.json.encode(_text(value))) if type(value) is str else _raw(value)


def _text(value: Any) -> str:
    """A string of the file; what is half of a surrogate pair, or was no UTF-8, becomes the replacement character."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if type(value) is str else ""


def _raw(value: Any) -> Raw:
    return Raw(value.encode() if isinstance(value, _Number) else b"")


def _plain(value: Any) -> Any:
    """A number as Python's, if it is a finite one of ordinary length; any other value as it is."""
    if not isinstance(value, _Number):
        return value
    try:
        return int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        return -1
