"""Times as Slurm writes and reads them."""

from __future__ import annotations

import re

_DURATION_PATTERN = re.compile(r"^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?\Z")
_NO_LIMIT_WORDS = ("UNLIMITED", "INFINITE")
LONGEST_DAYS = 1000  # a cluster file has no longer time limit


def parse_time_limit(limit_text: str) -> int | None:
    """A time limit in a cluster file, in seconds; None for UNLIMITED. Raises ValueError for a text that sbatch does not read as
    a time, and for a limit of 0 seconds."""
    if limit_text.upper() in _NO_LIMIT_WORDS:
        return None
    limit_s = parse_duration_s(limit_text)
    if limit_s is None or limit_s >= LONGEST_DAYS * 86_400:
        allowed_forms = "M, M:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
        raise ValueError(
            f"found {limit_text!r}. Allowed: a time in quotes, as sbatch reads it: {allowed_forms}, below {LONGEST_DAYS} days."
        )
    if limit_s == 0:
        raise ValueError("found a limit of 0 seconds. Allowed: one second or more.")
    return limit_s


def parse_duration_s(duration_text: str) -> int | None:
    """A time as Slurm writes it (D-HH:MM:SS, HH:MM:SS, MM:SS, D-HH), in seconds; None for UNLIMITED, NONE and other words."""
    duration_match = _DURATION_PATTERN.match(duration_text.strip())
    if duration_match is None or len(duration_text) > 24:
        return None
    days, *clock_parts = (None if clock_part is None else int(clock_part) for clock_part in duration_match.groups())
    clock_numbers = [clock_part for clock_part in clock_parts if clock_part is not None]
    if days is not None:  # the text is D-HH, D-HH:MM or D-HH:MM:SS
        hours, minutes, seconds = [*clock_numbers, 0, 0][:3]
    elif len(clock_numbers) == 3:
        hours, minutes, seconds = clock_numbers
    else:  # the text is MM or MM:SS
        hours, minutes, seconds = 0, *[*clock_numbers, 0][:2]
    return (days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds
