"""Reads numbers with units, and times with and without time zones, from logs of other programs. A text that is not a number or
a time gives None."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from shardlab.errors import InputError

MIB = 2**20
_NUMBER_WITH_UNIT = re.compile(r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d{1,3})?)\s*([A-Za-z%°]*)", re.ASCII)
_SCALE_BY_UNIT = {"B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "mW": 1e-3,
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


def parse_number(value: object, scale: float = 1.0, factor_by_magnitude: dict[str, float] | None = None) -> float | None:
    """A number in a log, multiplied by the scale of its unit.

    scale: the factor if the text has no unit, or one that says only the kind. factor_by_magnitude: the meaning of
    letters after the number, in place of units."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value * scale if abs(value) < LARGEST else None  # also None for NaN, which is not smaller than any number
    number_match = _NUMBER_WITH_UNIT.fullmatch(value.strip()[:64]) if isinstance(value, str) else None
    if number_match is None or not any(character.isdigit() for character in number_match[1]):
        return None
    if factor_by_magnitude is not None:
        unit_factor = factor_by_magnitude.get(number_match[2])
    else:
        unit_factor = scale if number_match[2] in _PLAIN_UNITS else _SCALE_BY_UNIT.get(number_match[2])
    number = float(number_match[1].replace(",", "")) * unit_factor if unit_factor is not None else math.nan
    return number if abs(number) < LARGEST else None


def parse_zone(text: str) -> tzinfo:
    """The time zone of the option --zone: a name such as Europe/Berlin, or an offset such as +02:00. Raises InputError."""
    if offset_match := re.fullmatch(r"([-+])(\d{2}):?(\d{2})", text):
        offset = timedelta(hours=int(offset_match[2]), minutes=int(offset_match[3]))
        if offset < timedelta(hours=24):
            return timezone(-offset if offset_match[1] == "-" else offset)
    try:
        return ZoneInfo(text)
    except (OSError, ValueError, KeyError):
        raise InputError(f"--zone: {text[:64]!r} is no time zone. Allowed: a name such as Europe/Berlin, or +02:00.") from None


class LogClock:
    """Turns the times of a log into seconds since the epoch. needs_zone: whether a time without a zone was read so far."""

    def __init__(self, default_zone: tzinfo, start_s: float | None, line_distance_s: float) -> None:
        """zone: the zone of times that name none. start_s: the time of the first line, for logs without times or without dates;
        None: not known. line_distance_s: the distance of the lines of a log without times."""
        self._default_zone, self._start_s, self._line_distance_s = default_zone, start_s, line_distance_s
        self.needs_zone = False
        self._last_s = start_s

    def read_time(self, time_value: object) -> float | None:
        """The time in seconds since the epoch; None if the value is no time, or if its date is not known."""
        numeric_time = parse_number(time_value)
        if numeric_time is not None and numeric_time >= LEAST_EPOCH_S:
            return next((numeric_time / unit for unit in (1, 1e3, 1e6, 1e9) if numeric_time / unit < LEAST_EPOCH_S * 100), None)
        time_text = time_value.strip()[:64] if isinstance(time_value, str) else ""
        try:
            if time_match := _DATE_TIME.fullmatch(time_text):
                *time_parts, fraction, zone = time_match.groups()
                return self._convert_to_epoch_s([int(part or 0) for part in time_parts], zone) + float(f"0.{fraction or 0}")
            if time_match := _DATE_COMMAND.fullmatch(time_text):
                hour = _convert_to_hour_of_day(int(time_match[3]), time_match[6])
                date_parts = [int(time_match[8]), _MONTHS.index(time_match[1]) + 1, int(time_match[2])]
                return self._convert_to_epoch_s([*date_parts, hour, int(time_match[4]), int(time_match[5])], time_match[7])
            if (time_match := _TIME_OF_DAY.fullmatch(time_text)) and self._last_s is not None:
                return self._read_time_of_day(time_match)
        except (ValueError, OverflowError):
            return None
        return None

    def set_date(self, year: int, month: int, day: int) -> None:
        """Set the date of times that have none, as the head of a log states it."""
        self._last_s = self._convert_to_epoch_s([year, month, day, 0, 0, 0], None)

    def compute_line_time(self, line_index: int) -> float | None:
        """The time of a line of a log without times; None if the time of the first line is not known. line_index: from 0."""
        return None if self._start_s is None else self._start_s + line_index * self._line_distance_s

    def _read_time_of_day(self, time_match: re.Match[str]) -> float:
        """A time without a year. If it is half a day or more before the time before it, the next day has begun."""
        assert self._last_s is not None
        last_date = datetime.fromtimestamp(self._last_s, self._default_zone)
        month, day = (int(time_match[1]), int(time_match[2])) if time_match[1] else (last_date.month, last_date.day)
        clock_time = [_convert_to_hour_of_day(int(time_match[3]), time_match[6]), int(time_match[4]), int(time_match[5])]
        epoch_s = self._convert_to_epoch_s([last_date.year, month, day, *clock_time], None)
        if time_match[1] is None and epoch_s < self._last_s - HALF_DAY_S:
            epoch_s = self._convert_to_epoch_s([last_date.year, month, day, *clock_time], None) + 2 * HALF_DAY_S
        self._last_s = epoch_s
        return epoch_s

    def _convert_to_epoch_s(self, time_parts: list[int], zone_name: str | None) -> float:
        if zone_name in ("Z", "UTC", "GMT"):
            time_zone: tzinfo = UTC
        elif zone_name and zone_name[0] in "+-":
            time_zone = parse_zone(zone_name)
        else:  # also for abbreviations such as CST, which several zones have
            time_zone, self.needs_zone = self._default_zone, True
        year, month, day, hour, minute, second = time_parts
        return datetime(year, month, day, hour, minute, min(second, 59), tzinfo=time_zone).timestamp()


def _convert_to_hour_of_day(hour: int, half_of_day: str | None) -> int:
    """The hour from 0 to 23. half_of_day: AM or PM; None: the hour already is."""
    return hour if half_of_day is None else hour % 12 + (12 if half_of_day == "PM" else 0)
