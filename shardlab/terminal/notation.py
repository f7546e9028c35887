"""Formats numbers, sizes and times for people: with enough digits to compare them, and with one unit per column."""

from __future__ import annotations

import math

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
MB = 10.0**6  # bytes in a MB; decimal, because network speeds are given in decimal units


def format_number(number: float, significant_digits: int = 4) -> str:
    """A number with at least `significant_digits` significant digits and all digits before the decimal point; thousands are
    grouped."""
    if not math.isfinite(number):
        return str(number)
    if number == 0:
        return "0"
    decimal_count = max(significant_digits - 1 - math.floor(math.log10(abs(number))), 0)
    return f"{number:.{significant_digits - 1}e}" if decimal_count > significant_digits + 3 else f"{number:,.{decimal_count}f}"


def format_amount(amount: float) -> str:
    """A number in a sentence, such as `1,440`, `12.8` or `0.0312`: three significant digits, all digits before the decimal
    point, and never in scientific notation."""
    if not math.isfinite(amount) or amount == 0:
        return f"{amount:g}"
    amount_text = f"{amount:,.{max(2 - math.floor(math.log10(abs(amount))), 0)}f}"
    return amount_text.rstrip("0").rstrip(".") if "." in amount_text else amount_text


def format_spread(half_width: float) -> str:
    """Half the width of an interval (the number after ±), as text with two significant digits.

    More digits would suggest that the uncertainty itself is known precisely.
    """
    if not math.isfinite(half_width) or half_width == 0:
        return format_number(half_width)
    return format_number(round(half_width, 1 - math.floor(math.log10(abs(half_width)))), 2)


def choose_unit(byte_counts: list[float]) -> tuple[str, float]:
    """Choose the unit (B, KiB, MiB or GiB) for a column of sizes, by the largest size. byte_counts: the sizes in bytes.

    Returns (name of the unit, number of bytes in one unit).
    """
    largest_value = max(byte_counts, default=0)
    for unit_name, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if largest_value >= unit_bytes:
            return unit_name, unit_bytes
    return "B", 1.0


def format_time(epoch_s: float) -> str:
    """A time as text, such as `2031-06-01 12:30 UTC`. epoch_s: the time in seconds since the epoch."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
