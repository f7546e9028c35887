"""Parsers for pairs, lists, times and limits in the output of Slurm's commands, which several facts use."""

from __future__ import annotations

import re

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/]*)=(\S*)")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,60}\Z")
_DURATION = re.compile(r"^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?\Z")


def parse_pairs(line: str) -> dict[str, str]:
    """The values in a line of `scontrol --oneliner`, which contains words KEY=VALUE, by their keys."""
    return dict(_PAIR.findall(line))


def is_name(text: str) -> bool:
    """Whether the text can be the name of a partition, an account, a QOS, a GPU type or a feature in a cluster file."""
    return _NAME.match(text) is not None


def parse_names(text: str) -> tuple[str, ...] | None:
    """The names in a comma-separated list of Slurm; None if the list is ALL or empty. Texts that are no names are left out."""
    if text in ("ALL", "(null)", ""):
        return None
    return tuple(name for name in text.split(",") if is_name(name))


def parse_limit(text: str) -> int | None:
    """A limit that Slurm prints, as a number; None for UNLIMITED and for a text that is no number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def parse_duration_s(text: str) -> int | None:
    """A time as Slurm writes it (D-HH:MM:SS, HH:MM:SS, MM:SS, D-HH), in seconds; None for UNLIMITED, NONE and other words."""
    match = _DURATION.match(text.strip())
    if match is None or len(text) > 24:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    numbers = [part for part in parts if part is not None]
    if days is not None:  # the text is D-HH, D-HH:MM or D-HH:MM:SS
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # the text is MM or MM:SS
        hours, minutes, seconds = 0, *[*numbers, 0][:2]
    return (days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds
