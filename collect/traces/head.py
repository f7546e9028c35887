"""Reads the information in a trace file before its events: the host, the model of its GPUs, and the process groups of the
rank. Finds the rank: in the head, in the name of the file, or in the process groups of collectives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from shardlab.files.decoders import DECODE_FAULTS

_KEY_PATTERN = r'"{}"\s*:\s*'
_HOST_NAME = re.compile(_KEY_PATTERN.format("host_name").encode() + rb'("(?:[^"\\]|\\.){0,255}")')
_BACKEND = re.compile(_KEY_PATTERN.format("backend").encode() + rb'"([\w:,]{1,63})"')
_WORLD_SIZE = re.compile(_KEY_PATTERN.format("world_size").encode() + rb"(\d{1,9})\b")
_DEVICE_LIST = re.compile(_KEY_PATTERN.format("deviceProperties").encode() + rb"(?=\[)")
_GROUP_LIST = re.compile(_KEY_PATTERN.format("pg_config").encode() + rb"(?=\[)")
_LONGEST_LIST = 1 << 20  # the most characters of a JSON list that are read
_RANK_INFO = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_RANK_IN_NAME = re.compile(r"(?<![a-z])rank[-_=.]?(\d+)", re.IGNORECASE)
# SGLang and vLLM name files by the place in each group, such as TP-1-DP-0 or dp0_pp0_tp1.
_PLACE_IN_NAME = re.compile(r"(?<![a-z])(tp|dp|pp|ep|cp)[-_=]?(\d+)(?!\d)", re.IGNORECASE)
_MOST_RANKS = 1 << 31  # a number that is not smaller than this is not a rank


class NamedGroup(msgspec.Struct, frozen=True):
    """A process group in the list `distributedInfo` of a trace. Its fields have the names that the file uses."""

    pg_name: str
    pg_desc: str = ""
    pg_size: int | None = None
    ranks: list[int] = []


class TraceHead(msgspec.Struct, frozen=True):
    """The information before the events of a trace."""

    host: str = ""
    """The name of the host; "" if the file does not say it."""
    gpu: str = ""
    """The model of the host's GPUs; "" if the file does not say it or names several models."""
    backend: str = ""
    """The library of the default process group, in small letters; "" if the file does not say it."""
    world_size: int | None = None
    """The number of ranks of the run; None if the file does not say it."""
    groups: tuple[NamedGroup, ...] | None = None
    """The process groups of the rank; None if the file does not list them or the list cannot be read."""


class _Device(msgspec.Struct):
    name: str


def read_head(text: bytes) -> TraceHead:
    """Parse the text before the list of events. Information that is missing or damaged counts as unknown; no error is
    raised."""
    host_match = _HOST_NAME.search(text)
    backend_match = _BACKEND.search(text)
    devices = _read_list(text, _DEVICE_LIST, list[_Device])
    groups = _read_list(text, _GROUP_LIST, list[NamedGroup])
    gpu_models = {device.name for device in devices or []}
    return TraceHead(
        host=_decode_json(host_match[1], str) or "" if host_match else "",
        gpu=gpu_models.pop() if len(gpu_models) == 1 else "",
        backend=backend_match[1].decode().lower() if backend_match else "",
        world_size=int(size_match[1]) if (size_match := _WORLD_SIZE.search(text)) else None,
        groups=tuple(groups) if groups else None,
    )


def _read_list(text: bytes, key: re.Pattern[bytes], list_type: Any) -> Any:
    """Decode the JSON list that follows a key. None if the key is missing, or if the list is damaged or not of this type."""
    match = key.search(text)
    end = _find_end_of_list(text, match.end()) if match else None
    return None if match is None or end is None else _decode_json(text[match.end() : end], list_type)


def _find_end_of_list(text: bytes, start: int) -> int | None:
    """The index of the end of the JSON list that begins at `start`; None if the list does not end within _LONGEST characters.

    Brackets inside strings of the list do not count.
    """
    depth, is_in_string, end = 0, False, start
    for match in re.compile(rb'\\.|["\[\]]').finditer(text, start, start + _LONGEST_LIST):
        character = match[0]
        if character == b'"':
            is_in_string = not is_in_string
        elif not is_in_string and character in (b"[", b"]"):
            depth += 1 if character == b"[" else -1
            end = match.end()
            if not depth:
                return end
    return None


def _decode_json(text: bytes, value_type: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=value_type)
    except DECODE_FAULTS:
        return None


def find_stated_rank(text_around: bytes, path: Path) -> int | None:
    """The rank that the text of a trace states, or else the name of its file or of the folder of the file; None if none does.

    text_around: the text around the list of events.
    """
    if match := _RANK_INFO.search(text_around):
        try:
            rank = json.JSONDecoder().raw_decode(text_around[match.end() :].decode("utf-8", "replace"))[0].get("rank")
            if type(rank) is int and 0 <= rank < _MOST_RANKS:
                return rank
        except (ValueError, RecursionError):
            pass
    matches = (_RANK_IN_NAME.search(name) for name in (path.name, path.absolute().parent.name))
    return next((int(match[1]) for match in matches if match and int(match[1]) < _MOST_RANKS), None)


def find_rank_by_groups(groups: Iterable[tuple[int, ...]], path: Path) -> int | None:
    """The rank that is in all process groups of a trace; None if several ranks are. groups: the ranks of each group.

    If the trace has one group only, the name of the file may say the place of the rank in the group, as in run-TP-3.json: the
    place in tensor parallelism, or the only place in the name.
    """
    distinct_groups = dict.fromkeys(group for group in groups if group)
    if not distinct_groups:
        return None
    common_ranks = set.intersection(*(set(group) for group in distinct_groups))
    if len(common_ranks) == 1:
        return common_ranks.pop()
    places = {kind.lower(): int(place) for kind, place in _PLACE_IN_NAME.findall(path.name)}
    place = places.get("tp", next(iter(places.values())) if len(places) == 1 else None)
    large_groups = [group for group in distinct_groups if len(group) > 1]
    if place is not None and len(large_groups) == 1 and place < len(large_groups[0]):
        return large_groups[0][place]
    return None
