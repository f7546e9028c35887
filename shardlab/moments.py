"""Durations and moments as text for people, and moments of others as values. Text is in UTC, with the local time beside it."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo


def read(text: str) -> datetime | None:
    """A time in ISO 8601, with or without a zone. None: the text is none, or its year leaves no room for other zones."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if 1 < moment.year < 9999 else None


def duration(seconds: float) -> str:
    """Seconds for a person, in two units at most."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m {rest:02}s"
    return f"{hours}h {minutes:02}m" if hours < 24 else f"{hours // 24}d {hours % 24:02}h"


def in_words(moment: datetime, zone: tzinfo | None = None) -> str:
    """`2031-05-02 18:00 UTC (20:00 CEST)`. moment: with a time zone. zone: None: the local zone of this machine."""
    utc, local = moment.astimezone(UTC), moment.astimezone(zone)
    if not local.utcoffset():
        return f"{utc:%Y-%m-%d %H:%M} UTC"
    day = "" if local.date() == utc.date() else f"{local:%Y-%m-%d} "
    return f"{utc:%Y-%m-%d %H:%M} UTC ({day}{local:%H:%M %Z})"
