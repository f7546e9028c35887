"""Times as Slurm writes and reads them."""

from __future__ import annotations

import re

_DURATION = re.compile(r"^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?\Z")
_NO_LIMIT = ("UNLIMITED", "INFINITE")
LONGEST_DAYS = 1000  # a cluster file has no longer time limit


def parse_time_limit(text: str) -> int | None:
    """A time limit in a cluster file, in seconds; None for UNLIMITED. Raises ValueError for a text that sbatch does not read as
    a time, and for a limit of 0 seconds."""
    if text.upper() in _NO_LIMIT:
        return None
    seconds = parse_duration_s(text)
    if seconds is None or seconds >= LONGEST_DAYS * 86_400:
        forms = "M, M:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
        raise ValueError(f"found {text!r}. Allowed: a time in quotes, as sbatch reads it: {forms}, below {LONGEST_DAYS} days.")
    if seconds == 0:
        raise ValueError("found a limit of 0 seconds. Allowed: one second or more.")
    return seconds


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
