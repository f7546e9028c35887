"""Writes durations and times as text for people, and reads times in ISO 8601. A time is written in UTC and in local time."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo


def parse_time(time_text: str) -> datetime | None:
    """Read a time in ISO 8601, with or without a time zone.

    Returns None if the text is not a time in ISO 8601, or if its year is so small or so large that the time cannot be converted
    to every time zone.
    """
    try:
        parsed_time = datetime.fromisoformat(time_text)
    except ValueError:
        return None
    return parsed_time if 1 < parsed_time.year < 9999 else None


def parse_time_as_utc(time_text: str) -> datetime | None:
    """Read a time as `parse_time` does. A time without a zone is read as UTC."""
    parsed_time = parse_time(time_text)
    return parsed_time if parsed_time is None or parsed_time.tzinfo is not None else parsed_time.replace(tzinfo=UTC)


def format_duration(duration_s: float) -> str:
    """A duration as text for people, in at most two units, such as `2h 05m`."""
    minutes, rest_seconds = divmod(round(duration_s), 60)
    if not minutes:
        return f"{rest_seconds}s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m {rest_seconds:02}s"
    return f"{hours}h {minutes:02}m" if hours < 24 else f"{hours // 24}d {hours % 24:02}h"


def format_time(moment: datetime, zone: tzinfo | None = None) -> str:
    """A time as text for people, such as `2031-05-02 18:00 UTC (20:00 CEST)`.

    moment: a time with a time zone. zone: the second time zone in the text; None: the local time zone of this machine.
    """
    utc_time, local_time = moment.astimezone(UTC), moment.astimezone(zone)
    if not local_time.utcoffset():
        return f"{utc_time:%Y-%m-%d %H:%M} UTC"
    local_day = "" if local_time.date() == utc_time.date() else f"{local_time:%Y-%m-%d} "
    return f"{utc_time:%Y-%m-%d %H:%M} UTC ({local_day}{local_time:%H:%M %Z})"
