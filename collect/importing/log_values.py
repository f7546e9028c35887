"""Reads numbers with units, and times with and without time zones, from logs of other programs. A text that is not a number or
a time gives None."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from shardlab.errors import InputError

MIB = 2**20
_NUMBER = re.compile(r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d{1,3})?)\s*([A-Za-z%°]*)", re.ASCII)
_UNIT_SCALES = {"B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "mW": 1e-3,
                "kW": 1e3, "GHz": 1e3}  # fmt: skip
_PLAIN_UNITS = {"", "%", "W", "C", "°C", "MHz", "J"}  # the value of a text with such a unit is multiplied by the default scale
MAGNITUDES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}  # how nanotron shortens numbers: 1.05M
LARGEST = 2**62  # larger values are errors: no count in a log reaches them
LEAST_EPOCH_S = 1e8  # a smaller number is a duration and not a time since the epoch
_DATE_TIME = re.compile(
    r"(\d{4})[-/]?(\d{2})[-/]?(\d{2})[T _]+(\d{1,2}):(\d{2})(?::(\d{2}))?(?:[.,](\d{1,9}))?\s*(Z|UTC|GMT|[-+]\d{2}:?\d{2})?"
)
_DATE_COMMAND = re.compile(r"[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) (\d{1,2}):(\d{2}):(\d{2}) (?:(AM|PM) )?(\S+) (\d{4})")
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_TIME_OF_DAY = re.compile(r"(?:(\d{2})/(\d{2}) )?(\d{1,2}):(\d{2}):(\d{2})(?: ?(AM|PM))?")
HALF_DAY_S = 43_200


def parse_number(value: object, scale: float = 1.0, magnitudes: dict[str, float] | None = None) -> float | None:
    """A number in a log, multiplied by the scale of its unit.

    scale: the factor if the text has no unit, or one that says only the kind. magnitudes: the meaning of letters after the
    number, in place of units.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value * scale if abs(value) < LARGEST else None  # also None for NaN, which is not smaller than any number
    match = _NUMBER.fullmatch(value.strip()[:64]) if isinstance(value, str) else None
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    if magnitudes is not None:
        factor = magnitudes.get(match[2])
    else:
        factor = scale if match[2] in _PLAIN_UNITS else _UNIT_SCALES.get(match[2])
    number = float(match[1].replace(",", "")) * factor if factor is not None else math.nan
    return number if abs(number) < LARGEST else None


def parse_zone(text: str) -> tzinfo:
    """The time zone of the option --zone: a name such as Europe/Berlin, or an offset such as +02:00. Raises InputError."""
    if match := re.fullmatch(r"([-+])(\d{2}):?(\d{2})", text):
        offset = timedelta(hours=int(match[2]), minutes=int(match[3]))
        if offset < timedelta(hours=24):
            return timezone(-offset if match[1] == "-" else offset)
    try:
        return ZoneInfo(text)
    except (OSError, ValueError, KeyError):
        raise InputError(f"--zone: {text[:64]!r} is no time zone. Allowed: a name such as Europe/Berlin, or +02:00.") from None


class LogClock:
    """Turns the times of a log into seconds since the epoch. needs_zone: whether a time without a zone was read so far."""

    def __init__(self, zone: tzinfo, start_s: float | None, every_s: float) -> None:
        """zone: the zone of times that name none. start_s: the time of the first line, for logs without times or without dates;
        None: not known. every_s: the distance of the lines of a log without times."""
        self._zone, self._start_s, self._every_s = zone, start_s, every_s
        self.needs_zone = False
        self._last_s = start_s

    def read_time(self, value: object) -> float | None:
        """The time in seconds since the epoch; None if the value is no time, or if its date is not known."""
        number = parse_number(value)
        if number is not None and number >= LEAST_EPOCH_S:
            return next((number / unit for unit in (1, 1e3, 1e6, 1e9) if number / unit < LEAST_EPOCH_S * 100), None)
        text = value.strip()[:64] if isinstance(value, str) else ""
        try:
            if match := _DATE_TIME.fullmatch(text):
                *time_parts, fraction, zone = match.groups()
                return self._to_seconds([int(part or 0) for part in time_parts], zone) + float(f"0.{fraction or 0}")
            if match := _DATE_COMMAND.fullmatch(text):
                hour = _hour_of_day(int(match[3]), match[6])
                date = [int(match[8]), _MONTHS.index(match[1]) + 1, int(match[2])]
                return self._to_seconds([*date, hour, int(match[4]), int(match[5])], match[7])
            if (match := _TIME_OF_DAY.fullmatch(text)) and self._last_s is not None:
                return self._read_time_of_day(match)
        except (ValueError, OverflowError):
            return None
        return None

    def set_date(self, year: int, month: int, day: int) -> None:
        """Set the date of times that have none, as the head of a log states it."""
        self._last_s = self._to_seconds([year, month, day, 0, 0, 0], None)

    def count_time(self, index: int) -> float | None:
        """The time of a line of a log without times; None if the time of the first line is not known. index: from 0."""
        return None if self._start_s is None else self._start_s + index * self._every_s

    def _read_time_of_day(self, match: re.Match[str]) -> float:
        """A time without a year. If it is half a day or more before the time before it, the next day has begun."""
        assert self._last_s is not None
        date = datetime.fromtimestamp(self._last_s, self._zone)
        month, day = (int(match[1]), int(match[2])) if match[1] else (date.month, date.day)
        clock_time = [_hour_of_day(int(match[3]), match[6]), int(match[4]), int(match[5])]
        seconds = self._to_seconds([date.year, month, day, *clock_time], None)
        if match[1] is None and seconds < self._last_s - HALF_DAY_S:
            seconds = self._to_seconds([date.year, month, day, *clock_time], None) + 2 * HALF_DAY_S
        self._last_s = seconds
        return seconds

    def _to_seconds(self, time_parts: list[int], zone_name: str | None) -> float:
        if zone_name in ("Z", "UTC", "GMT"):
            zone: tzinfo = UTC
        elif zone_name and zone_name[0] in "+-":
            zone = parse_zone(zone_name)
        else:  # also for abbreviations such as CST, which several zones have
            zone, self.needs_zone = self._zone, True
        year, month, day, hour, minute, second = time_parts
        return datetime(year, month, day, hour, minute, min(second, 59), tzinfo=zone).timestamp()


def _hour_of_day(hour: int, half_of_day: str | None) -> int:
    """The hour from 0 to 23. half_of_day: AM or PM; None: the hour already is."""
    return hour if half_of_day is None else hour % 12 + (12 if half_of_day == "PM" else 0)
