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
_HOST_NAME_PATTERN = re.compile(_KEY_PATTERN.format("host_name").encode() + rb'("(?:[^"\\]|\\.){0,255}")')
_BACKEND_PATTERN = re.compile(_KEY_PATTERN.format("backend").encode() + rb'"([\w:,]{1,63})"')
_WORLD_SIZE_PATTERN = re.compile(_KEY_PATTERN.format("world_size").encode() + rb"(\d{1,9})\b")
_DEVICE_LIST_KEY = re.compile(_KEY_PATTERN.format("deviceProperties").encode() + rb"(?=\[)")
_GROUP_LIST_KEY = re.compile(_KEY_PATTERN.format("pg_config").encode() + rb"(?=\[)")
_MOST_LIST_CHARACTERS = 1 << 20  # the most characters of a JSON list that are read
_RANK_INFO_KEY = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_RANK_IN_NAME = re.compile(r"(?<![a-z])rank[-_=.]?(\d+)", re.IGNORECASE)
# SGLang and vLLM name files by the place in each group, such as TP-1-DP-0 or dp0_pp0_tp1.
_PLACE_IN_NAME = re.compile(r"(?<![a-z])(tp|dp|pp|ep|cp)[-_=]?(\d+)(?!\d)", re.IGNORECASE)
_RANK_LIMIT = 1 << 31  # a number that is not smaller than this is not a rank


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


class _DeviceProperties(msgspec.Struct):
    name: str


def read_head(head_text: bytes) -> TraceHead:
    """Parse the text before the list of events. Information that is missing or damaged counts as unknown; no error is
    raised."""
    host_match = _HOST_NAME_PATTERN.search(head_text)
    backend_match = _BACKEND_PATTERN.search(head_text)
    devices = _read_list(head_text, _DEVICE_LIST_KEY, list[_DeviceProperties])
    named_groups = _read_list(head_text, _GROUP_LIST_KEY, list[NamedGroup])
    gpu_models = {device.name for device in devices or []}
    return TraceHead(
        host=_decode_json(host_match[1], str) or "" if host_match else "",
        gpu=gpu_models.pop() if len(gpu_models) == 1 else "",
        backend=backend_match[1].decode().lower() if backend_match else "",
        world_size=int(size_match[1]) if (size_match := _WORLD_SIZE_PATTERN.search(head_text)) else None,
        groups=tuple(named_groups) if named_groups else None,
    )


def _read_list(head_text: bytes, key_pattern: re.Pattern[bytes], list_type: Any) -> Any:
    """Decode the JSON list that follows a key. None if the key is missing, or if the list is damaged or not of this type."""
    key_match = key_pattern.search(head_text)
    list_end = _find_end_of_list(head_text, key_match.end()) if key_match else None
    return None if key_match is None or list_end is None else _decode_json(head_text[key_match.end() : list_end], list_type)


def _find_end_of_list(head_text: bytes, list_start: int) -> int | None:
    """The index of the end of the JSON list that begins at `list_start`; None if the list does not end within _LONGEST
    characters.

    Brackets inside strings of the list do not count."""
    bracket_depth, is_in_string, list_end = 0, False, list_start
    for match in re.compile(rb'\\.|["\[\]]').finditer(head_text, list_start, list_start + _MOST_LIST_CHARACTERS):
        character = match[0]
        if character == b'"':
            is_in_string = not is_in_string
        elif not is_in_string and character in (b"[", b"]"):
            bracket_depth += 1 if character == b"[" else -1
            list_end = match.end()
            if not bracket_depth:
                return list_end
    return None


def _decode_json(json_text: bytes, value_type: Any) -> Any:
    try:
        return msgspec.json.decode(json_text, type=value_type)
    except DECODE_FAULTS:
        return None


def find_stated_rank(text_around: bytes, path: Path) -> int | None:
    """The rank that the text of a trace states, or else the name of its file or of the folder of the file; None if none does.

    text_around: the text around the list of events.
    """
    if match := _RANK_INFO_KEY.search(text_around):
        try:
            rank = json.JSONDecoder().raw_decode(text_around[match.end() :].decode("utf-8", "replace"))[0].get("rank")
            if type(rank) is int and 0 <= rank < _RANK_LIMIT:
                return rank
        except (ValueError, RecursionError):
            pass
    name_matches = (_RANK_IN_NAME.search(name) for name in (path.name, path.absolute().parent.name))
    return next((int(match[1]) for match in name_matches if match and int(match[1]) < _RANK_LIMIT), None)


def find_rank_by_groups(rank_groups: Iterable[tuple[int, ...]], path: Path) -> int | None:
    """The rank that is in all process groups of a trace; None if several ranks are. rank_groups: the ranks of each group.

    If the trace has one group only, the name of the file may say the place of the rank in the group, as in run-TP-3.json: the
    place in tensor parallelism, or the only place in the name.
    """
    distinct_groups = dict.fromkeys(group for group in rank_groups if group)
    if not distinct_groups:
        return None
    common_ranks = set.intersection(*(set(group) for group in distinct_groups))
    if len(common_ranks) == 1:
        return common_ranks.pop()
    places = {group_kind.lower(): int(place_in_group) for group_kind, place_in_group in _PLACE_IN_NAME.findall(path.name)}
    place_in_group = places.get("tp", next(iter(places.values())) if len(places) == 1 else None)
    large_groups = [group for group in distinct_groups if len(group) > 1]
    if place_in_group is not None and len(large_groups) == 1 and place_in_group < len(large_groups[0]):
        return large_groups[0][place_in_group]
    return None
