"""Finds the rank of a trace file: in its head, in its name, or in the process groups of its collectives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

_RANK_INFO = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_RANK_IN_NAME = re.compile(r"(?<![a-z])rank[-_=.]?(\d+)", re.IGNORECASE)
# SGLang and vLLM name files by the place in each group, such as TP-1-DP-0 or dp0_pp0_tp1.
_PLACE_IN_NAME = re.compile(r"(?<![a-z])(tp|dp|pp|ep|cp)[-_=]?(\d+)(?!\d)", re.IGNORECASE)
_MOST_RANKS = 1 << 31  # a number that is not smaller than this is not a rank


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
