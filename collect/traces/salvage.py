"""Reads as much as possible of a trace file that is cut short or damaged: its text in blocks, and its events one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw
from zlib_ng import zlib_ng  # takes less than half the time that zlib takes to decompress

from collect.traces.event import AnyEvent, AnyEventArgs
from shardlab.files import files

# bytes that are decoded at once: they fit into the second-level cache, and are a quarter faster than 4 MiB
BLOCK_BYTES = 1 << 18
_READ_GZIP_BYTES = 1 << 16  # bytes of a gzip file that are read at once; few: each decompression copies those that are left
GZIP_MAGIC = b"\x1f\x8b"
_BETWEEN_EVENTS = re.compile(r"[\s,]*")
_LIST_END = re.compile(r"\]\s*(?:\}|,\s*\"|\Z)")
_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{)")
_PHASE_KEY = re.compile(r"\"ph\"\s*:")
_KEY_BY_TEXT_FIELD = {field.name: field.encode_name for field in msgspec.structs.fields(AnyEventArgs) if field.type is Raw}
# the text that printf of C writes for a number that is not finite
_BARE_NOT_FINITE = re.compile(r"(:\s*)(-?)(?:inf|nan)(?=\s*[,}\]])")


class TraceCutShort(Exception):
    """Raised when nothing more can be read from a trace file. The message says why."""


def read_blocks(path: Path) -> Iterator[bytes]:
    """The text of a file, decompressed if necessary, in blocks of at most BLOCK bytes.

    Raises TraceCutShort after the last readable block if the file is damaged; raises OSError if the file cannot be opened.
    """
    with files.open_regular(path) as file:
        is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        file.seek(0)
        read_bytes = BLOCK_BYTES if not is_gzip else min(BLOCK_BYTES, _READ_GZIP_BYTES)
        raw_blocks = iter(lambda: file.read(read_bytes), b"")
        yield from _decompress_blocks(raw_blocks) if is_gzip else raw_blocks


def _decompress_blocks(raw_blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress blocks of a gzip file. If the file has several gzip members, their texts are joined."""
    decompressor, has_ended = zlib_ng.decompressobj(wbits=31), False
    for block in raw_blocks:
        while block:
            if has_ended and not (block := block.lstrip(b"\0")):  # zeros behind the last gzip member are padding, as on a tape
                break
            if has_ended:
                decompressor, has_ended = zlib_ng.decompressobj(wbits=31), False
            decompressor_copy = decompressor.copy()  # type: ignore[attr-defined]  # its stub lacks this method
            try:
                decompressed = decompressor.decompress(block, BLOCK_BYTES)
            except zlib_ng.error as error:  # type: ignore[misc]  # its stub declares an instance
                # only if there is any: an empty text would mean the end of the file
                if decompressed := _decompress_until_damage(decompressor_copy, block):
                    yield decompressed
                raise TraceCutShort(f"its gzip stream is damaged ({error})") from None
            if decompressed:
                yield decompressed
            has_ended = decompressor.eof
            block = decompressor.unused_data if has_ended else decompressor.unconsumed_tail
    if not has_ended:
        raise TraceCutShort("its gzip stream ends too early")


def _decompress_until_damage(decompressor: zlib_ng._Decompress, damaged_block: bytes) -> bytes:
    """The decompressed text of a block up to the place where the block is damaged. decompressor: the decompressor
    in its state before the block.

    The block is decompressed byte by byte, because zlib-ng discards the whole output of a call that fails.
    """
    decompressed = bytearray()
    for byte_index in range(len(damaged_block)):
        try:
            decompressed += decompressor.decompress(damaged_block[byte_index : byte_index + 1])
        except zlib_ng.error:  # type: ignore[misc]
            break
    return bytes(decompressed)


class _NumberText(str):
    """The decimal text of a JSON number. The type distinguishes it from the text of a JSON string."""


class SalvagedEvents(NamedTuple):
    """The events that could be read from a part of the text of a trace."""

    events: list[AnyEvent]
    lost_count: int
    """The number of events that could not be read."""
    rest_offset: int
    """The offset in bytes at which the unread rest of the text begins; the rest may become readable when more text follows."""
    has_ended: bool
    """Whether the end of the list of events was reached."""


# strict=True: an event with a control character in a string is not valid. Without this rule, a stretch of zero bytes in a
# damaged file could join two events into one event.
_OBJECT_DECODER = json.JSONDecoder(parse_float=_NumberText, parse_int=_NumberText, parse_constant=_NumberText, strict=True)


def salvage_events(raw: bytes, *, is_final: bool) -> SalvagedEvents:
    """Read the events in a text that begins between two events. is_final: whether no more text follows.

    If an event is not valid JSON, only this event is lost: reading continues at the next object that follows another object and
    that can be read as an event. For each skipped part of the text, `lost_count` grows by the number of its phases (`"ph":`),
    but at least by 1.
    """
    text = raw.decode("utf-8", "surrogateescape")  # bytes that are not UTF-8 become characters that encode to the same bytes
    text = _BARE_NOT_FINITE.sub(lambda match: match[1] + " " * len(match[2]) + "NaN", text)
    events: list[AnyEvent] = []
    lost_count, offset = 0, 0

    def make_salvaged_events(*, has_ended: bool) -> SalvagedEvents:
        return SalvagedEvents(events, lost_count, len(text[:offset].encode("utf-8", "surrogateescape")), has_ended)

    while True:
        offset = _BETWEEN_EVENTS.match(text, offset).end()  # type: ignore[union-attr]  # the pattern also matches an empty text
        # If events follow a `]`, it does not end the list of events, but a list inside an event that was lost.
        if _LIST_END.match(text, offset) and not _PHASE_KEY.search(text, offset):
            return make_salvaged_events(has_ended=True)
        if offset == len(text):
            return make_salvaged_events(has_ended=False)
        decoded_object = _decode_object(text, offset)
        if decoded_object:
            event_fields, offset = decoded_object
            events.append(_build_event(event_fields))
            continue
        next_offset = _find_next_event(text, offset)
        if next_offset is None and not is_final:
            return make_salvaged_events(has_ended=False)
        skipped_end = len(text) if next_offset is None else next_offset
        lost_count += max(1, len(_PHASE_KEY.findall(text, offset, skipped_end)))
        offset = skipped_end


def _decode_object(decoded_text: str, offset: int) -> tuple[dict[str, Any], int] | None:
    try:
        object_fields, object_end = _OBJECT_DECODER.raw_decode(decoded_text, offset)
    except (ValueError, RecursionError):
        return None
    return (object_fields, object_end) if isinstance(object_fields, dict) else None


def _find_next_event(decoded_text: str, offset: int) -> int | None:
    """The offset of the next event that can be read; None if no such event follows."""
    for match in _NEXT_EVENT.finditer(decoded_text, offset):
        decoded_object = _decode_object(decoded_text, match.end())
        if decoded_object and type(decoded_object[0].get("ph")) is str:
            return match.end()
    return None


def _build_event(event_fields: dict[str, Any]) -> AnyEvent:
    event_args = event_fields.get("args")
    thread_id = event_fields.get("tid", -1)
    return AnyEvent(
        ph=_clean_string(event_fields.get("ph")),
        cat=_clean_string(event_fields.get("cat")),
        name=_clean_string(event_fields.get("name")),
        tid=str(thread_id) if isinstance(thread_id, _NumberText) else _clean_string(thread_id),
        ts=_encode_json_text(event_fields.get("ts")),
        dur=_encode_json_text(event_fields.get("dur")),
        args=_build_args(event_args) if isinstance(event_args, dict) else None,
    )


def _build_args(args_fields: dict[str, Any]) -> AnyEventArgs:
    json_texts = {name: _encode_json_text(args_fields[key]) for name, key in _KEY_BY_TEXT_FIELD.items() if key in args_fields}
    return AnyEventArgs(
        **{key: _convert_to_number(args_fields.get(key, -1)) for key in ("correlation", "stream", "device")}, **json_texts
    )


def _encode_json_text(json_value: Any) -> Raw:
    """The JSON text of a string, of a number or of a list of strings and numbers; an empty text for any other value."""
    if isinstance(json_value, list):
        return Raw(b"[%b]" % b",".join(_encode_json_text(element) for element in json_value))
    return Raw(msgspec.json.encode(_clean_string(json_value))) if type(json_value) is str else _encode_number_text(json_value)


def _clean_string(json_value: Any) -> str:
    """A string of the file; "" for any other value. Half of a surrogate pair, and bytes that are not UTF-8, become U+FFFD."""
    return json_value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if type(json_value) is str else ""


def _encode_number_text(json_value: Any) -> Raw:
    return Raw(json_value.encode() if isinstance(json_value, _NumberText) else b"")


def _convert_to_number(json_value: Any) -> Any:
    """Convert the text of a JSON number to an int or a float (-1 if this fails); any other value is returned unchanged."""
    if not isinstance(json_value, _NumberText):
        return json_value
    try:
        return int(json_value) if json_value.lstrip("-").isdigit() else float(json_value)
    except ValueError:
        return -1
