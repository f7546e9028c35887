"""Formats numbers, sizes and times for people: with enough digits to compare them, and with one unit per column."""

from __future__ import annotations

import math

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
MB = 10.0**6  # bytes in a MB; decimal, because network speeds are given in decimal units


def format_number(value: float, digits: int = 4) -> str:
    """A number with at least `digits` significant digits and all digits before the decimal point; thousands are grouped."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimal_count = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{digits - 1}e}" if decimal_count > digits + 3 else f"{value:,.{decimal_count}f}"


def format_amount(value: float) -> str:
    """A number in a sentence, such as `1,440`, `12.8` or `0.0312`: three significant digits, all digits before the decimal
    point, and never in scientific notation."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    amount_text = f"{value:,.{max(2 - math.floor(math.log10(abs(value))), 0)}f}"
    return amount_text.rstrip("0").rstrip(".") if "." in amount_text else amount_text


def format_spread(value: float) -> str:
    """Half the width of an interval (the number after ±), as text with two significant digits.

    More digits would suggest that the uncertainty itself is known precisely.
    """
    if not math.isfinite(value) or value == 0:
        return format_number(value)
    return format_number(round(value, 1 - math.floor(math.log10(abs(value)))), 2)


def bytes_unit(byte_counts: list[float]) -> tuple[str, float]:
    """Choose the unit (B, KiB, MiB or GiB) for a column of sizes, by the largest size. byte_counts: the sizes in bytes.

    Returns (name of the unit, number of bytes in one unit).
    """
    largest_value = max(byte_counts, default=0)
    for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if largest_value >= unit_bytes:
            return unit, unit_bytes
    return "B", 1.0


def format_time(seconds: float) -> str:
    """A time as text, such as `2031-06-01 12:30 UTC`. seconds: the time in seconds since the epoch."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
