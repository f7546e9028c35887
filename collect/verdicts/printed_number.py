"""Parses a number that a study printed into a value in the unit of a metric. An ambiguous text is an error; nothing is
guessed."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Relation = Literal["=", "<", ">"]

_TIME_WORDS = {
    "s": ("s", "sec", "secs", "second", "seconds"),
    "ms": ("ms", "msec", "msecs", "millisecond", "milliseconds"),
    "μs": ("μs", "us", "microsecond", "microseconds"),
    "ns": ("ns", "nanosecond", "nanoseconds"),
    "min": ("min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_UNIT_FACTORS: dict[str, tuple[str, float]] = {
    **{word: ("s", _SECONDS[name]) for name, words in _TIME_WORDS.items() for word in words},
    **{f"{prefix}B": ("bytes", 1000.0**power) for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}iB": ("bytes", 1024.0**power) for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
    **{f"{prefix}b": ("bytes", 1000.0**power / 8) for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
    **dict.fromkeys(("byte", "bytes"), ("bytes", 1.0)),
    "kB": ("bytes", 1e3),
    **dict.fromkeys(("%", "percent", "per cent", "pct", "points", "percentage points"), ("%", 1.0)),
    **dict.fromkeys(("x", "X", "×", "times", "fold"), ("x", 1.0)),
    "J": ("J", 1.0),
    "kJ": ("J", 1e3),
    "Wh": ("J", 3600.0),
    "kWh": ("J", 3.6e6),
    **{name: (name, 1.0) for name in ("nats", "updates")},
}
COUNT_UNITS = ("", "parameters", "calls")  # units of metrics that are counts; studies print counts without a unit
_COUNT_WORDS = {"": 1.0, "k": 1e3, "K": 1e3, "thousand": 1e3, "M": 1e6, "million": 1e6, "B": 1e9, "bn": 1e9, "billion": 1e9}
_ITEM_WORDS = {"tok": "tokens", "token": "tokens", "tokens": "tokens", "img": "images", "imgs": "images", "image": "images"}
_ITEM_WORDS |= {
    "images": "images",
    "sample": "samples",
    "samples": "samples",
    "sequence": "sequences",
    "sequences": "sequences",
}
_STATE_WORDS = {"oom": "oom", "out of memory": "oom", "timeout": "timeout", "timed out": "timeout", "failed": "failed"}
_BINARY_FACTORS = {"KB": 1.024, "kB": 1.024, "MB": 1.024**2, "GB": 1.024**3, "TB": 1.024**4}

_PLAIN_CHARACTERS = str.maketrans({
    "\u00a0": " ", "\u2007": " ", "\u2009": " ", "\u202f": " ", "\u2212": "-", "\u2011": "-", "\u00b5": "μ", "\u2014": "–",
})  # fmt: skip
_ABOUT_PATTERN = r"(?:~|≈|about|around|approximately|approx\.?|roughly|circa|ca\.|nearly|almost|near|peaking)"
_MORE_PATTERN, _LESS_PATTERN = r"(?:>=?|≥|more than|over|above|at least)", r"(?:<=?|≤|less than|under|below|up to|at most)"
_NUMBER_PATTERN = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+|\s*[x×]\s*10\^-?\d+)?"
_WHOLE_PATTERN = re.compile(
    rf"(?P<before>(?:(?:{_ABOUT_PATTERN}|{_MORE_PATTERN}|{_LESS_PATTERN})\s*)*)(?P<number>{_NUMBER_PATTERN})"
    rf"(?:\s*(?P<first_unit>[^\d\s–±-][^\d–±]*?)?\s*(?P<join>–|-|\bto\b|±|\+/-)\s*(?P<other>{_NUMBER_PATTERN}))?"
    r"\s*-?(?P<unit>[^\d\s*†‡§][^*†‡§]*?)?\s*[*†‡§]*"
)


class ParsedNumber(msgspec.Struct, frozen=True, omit_defaults=True):
    """A number that a study printed, parsed."""

    unit: str
    """The unit of value, low and high."""
    value: float | None = None
    """In `unit`; None if the text is a state."""
    low: float | None = None
    """The smallest value that the text can mean, in `unit`: from the rounding of its last digit, or from a printed range."""
    high: float | None = None
    """The largest value that the text can mean, in `unit`."""
    relation: Relation = "="
    """`<` or `>` if the text is a bound, else `=`."""
    approximate: bool = False
    """Whether the text says that the number is approximate, such as with "about"."""
    state: str = ""
    """If the text is not a number but the end of a run, such as oom; else ""."""
    remark: str = ""
    """How the text was interpreted, if another interpretation is possible."""


def parse_number(text: str, unit: str | None, metric_unit: str, *, is_change: bool = False) -> ParsedNumber:
    """Parse a number that a study printed into the unit of a metric.

    text: the number as printed. unit: the unit in the head of the table, if there is one. metric_unit: the unit of the metric;
    for units/s the text may name any items, such as tokens, and the result has the unit of these items.

    is_change: whether the metric is a difference from another cell; such a number, like a percentage, may begin with a plus
    sign.

    If the metric is in percent, a number without a unit is a share: 0.92 is 92 %. MB means 10^6 bytes. Raises ValueError, with
    a sentence, if the text is not a number with a unit, or if the metric cannot have this unit.
    """
    plain_text = text.translate(_PLAIN_CHARACTERS).strip()
    if end_state := _STATE_WORDS.get(plain_text.lower()):
        return ParsedNumber(unit="", state=end_state)
    match = _WHOLE_PATTERN.fullmatch(plain_text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit.")
    printed_unit = (match["unit"] or "").strip().rstrip(".").strip()
    if match["first_unit"] and match["first_unit"].strip() != printed_unit:
        raise ValueError(f"{text!r} has two units.")
    if printed_unit and unit and printed_unit != unit:
        raise ValueError(f"{text!r} has another unit than the head of its table, {unit}.")
    words_before = match["before"].lower()
    if match["number"].startswith("+") and metric_unit != "%" and not is_change:
        raise ValueError(f"{text!r} is a change (+), but the metric, in {metric_unit or 'plain numbers'}, is not.")
    unit_text = printed_unit or unit or ""
    unit_name, unit_factor = _find_unit_and_factor(unit_text, metric_unit, text)
    value, rounding_error = _parse_value_and_rounding(match["number"])
    low, high = value - rounding_error, value + rounding_error
    if match["join"] in ("±", "+/-"):
        low, high = value - _parse_value_and_rounding(match["other"])[0], value + _parse_value_and_rounding(match["other"])[0]
    elif match["join"]:
        low, high = value, _parse_value_and_rounding(match["other"])[0]
        value = (low + high) / 2
        if low > high:
            raise ValueError(f"{text!r} is a range that ends before it begins.")
    binary_factor = _BINARY_FACTORS.get(unit_text)
    bound_sign: Relation = (
        ">" if re.search(_MORE_PATTERN, words_before) else "<" if re.search(_LESS_PATTERN, words_before) else "="
    )
    return ParsedNumber(
        unit=unit_name,
        value=value * unit_factor,
        low=None if bound_sign == "<" else (value if bound_sign == ">" else low) * unit_factor,
        high=None if bound_sign == ">" else (value if bound_sign == "<" else high) * unit_factor,
        relation=bound_sign,
        approximate=bool(re.search(_ABOUT_PATTERN, words_before)),
        remark=f"{unit_text} read as a power of 1,000 bytes (of 1,024: {100 * (binary_factor - 1):.1f} % more)"
        if binary_factor
        else "",
    )


def _find_unit_and_factor(unit_text: str, metric_unit: str, text: str) -> tuple[str, float]:
    """Returns (unit of the metric, factor by which a number in the text is multiplied to get a value in this unit).

    unit_text: the unit in the text or in the head of the table. text: the whole text, for an error message. Raises ValueError
    if the number in the text cannot be converted."""
    if metric_unit in COUNT_UNITS:
        count_word = re.sub(r"\s*(parameters|params)$", "", unit_text)
        if count_word in _COUNT_WORDS:
            return metric_unit, _COUNT_WORDS[count_word]
    elif metric_unit.endswith("/s"):
        if rate_unit := _parse_rate_unit(unit_text):
            return rate_unit
    elif not unit_text and metric_unit == "%":
        return "%", 100.0
    elif unit_text in _UNIT_FACTORS:
        target_unit, target_factor = _UNIT_FACTORS.get(metric_unit, (metric_unit, 1.0))
        source_unit, source_factor = _UNIT_FACTORS[unit_text]
        if source_unit == target_unit:
            return metric_unit, source_factor / target_factor
    unit_phrase = f"the unit {unit_text!r}" if unit_text else "no unit"
    raise ValueError(f"{text!r} has {unit_phrase}, but the metric is in {metric_unit or 'plain numbers'}.")


def _parse_rate_unit(unit_text: str) -> tuple[str, float] | None:
    """For a unit of items per time, such as `tok/ms`: (unit per second, factor to convert to it), such as (tokens/s, 1000).

    None if `unit_text` is another unit.
    """
    unit_match = re.fullmatch(r"([kKM]?)\s*([A-Za-z]+?)\s*(?:/|per)\s*([a-zμ]+)", unit_text)
    if unit_match is None:
        return None
    thousands_sign, item_word, time_unit = unit_match.groups()
    if item_word not in _ITEM_WORDS or _UNIT_FACTORS.get(time_unit, ("", 0.0))[0] != "s":
        return None
    return f"{_ITEM_WORDS[item_word]}/s", _COUNT_WORDS[thousands_sign] / _UNIT_FACTORS[time_unit][1]


def _parse_value_and_rounding(number_text: str) -> tuple[float, float]:
    """Returns (value of a number, half a unit of its last printed digit), such as (1.5, 0.05) for `1.5`."""
    number_match = re.fullmatch(r"(.*?)(?:[eE]([+-]?\d+)|\s*[x×]\s*10\^(-?\d+))?", number_text)
    assert number_match is not None
    digits_text = re.sub(r"[, ]", "", number_match[1])
    power_of_ten = 10.0 ** int(number_match[2] or number_match[3] or 0)
    decimal_count = len(digits_text.partition(".")[2])
    return float(digits_text) * power_of_ten, 0.5 * 10.0**-decimal_count * power_of_ten
