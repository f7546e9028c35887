"""Sizes and durations as text name the unit that their number has, and units in printed numbers and logs have their values.

The values of units are those of UNITS in support_units.py, with which no code of the product computes.
"""

import re

import pytest
from support_units import UNITS

from collect.fetching import progress
from collect.importing import log_columns, log_values
from collect.report import report_start, verdict_text
from collect.traces import advice
from collect.verdicts import printed_number
from jobs.planner import planner_table
from provision.clock import NodeClockOffset
from shardlab.terminal import moments, notation

KNOWN = {name: size for name, (_, size) in UNITS.items()} | {"KB": 1e3, "KiB/s": 1024.0, "m": 60.0, "d": 86400.0, "kWh": 3.6e6}
SIZES = [factor * base**power for base in (1000, 1024) for power in range(5) for factor in (0.0995, 0.11, 1, 7.5, 120)]
SECONDS = [0.00125, 0.35, 0.99, 1, 12, 59, 61, 3599, 3600, 7505, 90000, 400000]
FORMATTERS = {
    "the planner's size": (planner_table.format_size, SIZES),
    "a size in a verdict": (lambda size: verdict_text.format_quantity(size, "bytes"), SIZES),
    "a size at the start of the report": (lambda size: report_start._format_measured(size, None, "bytes")[0], SIZES),
    "a column of sizes": (lambda size: "{1:.3f} {0}".format(*scale_size(size)), SIZES),
    "the planner's duration": (planner_table.format_duration, SECONDS),
    "the rest of a fetch": (progress._format_duration, SECONDS[3:]),
    "a duration": (moments.format_duration, SECONDS[3:]),
    "advice about a trace": (lambda seconds: advice._format_ms(int(seconds * 1e9)), SECONDS),
    "an offset of a clock": (lambda seconds: str(NodeClockOffset(seconds, 0.0)).partition(" from ")[0], SECONDS),
}


def scale_size(size):
    unit, unit_bytes = notation.choose_unit([size])
    return unit, size / unit_bytes


def value_of(text):
    """The number that a text such as `2h 05m` or `1.2 GiB` states, in bytes or seconds, and the size of its last digit."""
    parts = re.findall(r"([\d,.]+(?:e[+-]?\d+)?) ?([^\W\d]+)", text)
    assert parts, text
    digits = re.sub(r"e.*", "", parts[-1][0]).partition(".")[2]
    step = float(f"1e-{len(digits)}") if "e" not in parts[-1][0] else 1e-2 * float(parts[-1][0].replace(",", ""))
    return sum(float(number.replace(",", "")) * KNOWN[unit] for number, unit in parts), step * KNOWN[parts[-1][1]]


@pytest.mark.parametrize("name", FORMATTERS)
def test_a_text_states_the_value_that_it_is_made_from(name):
    write, values = FORMATTERS[name]
    for value in values:
        stated, step = value_of(write(value))
        assert abs(stated - value) <= max(0.51 * step, 0.006 * value), write(value)


PRINTED = {
    **dict.fromkeys(("B", "KB", "MB", "GB", "TB", "kB", "KiB", "MiB", "GiB", "TiB", "byte", "bytes"), "bytes"),
    **dict.fromkeys(("s", "sec", "ms", "msec", "us", "μs", "ns", "min", "minutes", "h", "hours"), "s"),
    **dict.fromkeys(("J", "kJ", "Wh", "kWh"), "J"),
}
WORDS = {"byte": "B", "sec": "s", "msec": "ms", "μs": "us", "minutes": "min", "hours": "h"}
VALUES = KNOWN | {"kJ": 1e3, "Wh": 3600.0, "J": 1.0, **{word: KNOWN[unit] for word, unit in WORDS.items()}}


@pytest.mark.parametrize("unit", PRINTED)
def test_a_printed_number_has_the_value_of_its_unit(unit):
    assert printed_number.parse_number(f"2 {unit}", None, PRINTED[unit]).value == pytest.approx(2 * VALUES[unit])


@pytest.mark.parametrize("prefix", ["K", "k", "M", "G", "T"])
def test_a_printed_size_says_how_much_more_a_power_of_1024_is(prefix):
    more_pct = 100 * (KNOWN[f"{prefix.upper()}iB"] / VALUES[f"{prefix}B"] - 1)
    remark = printed_number.parse_number(f"2 {prefix}B", None, "bytes").remark
    assert remark == f"{prefix}B read as a power of 1,000 bytes (of 1,024: {more_pct:.1f} % more)"


@pytest.mark.parametrize(
    ("unit", "value"),
    [*((unit, KNOWN[unit]) for unit in ("B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB")),
     ("mW", 1e-3), ("W", 1.0), ("kW", 1e3), ("MHz", 1.0), ("GHz", 1e3), ("C", 1.0), ("%", 1.0)],
)  # fmt: skip
def test_a_number_in_a_log_has_the_value_of_its_unit(unit, value):
    assert log_values.parse_number(f"2 {unit}") == pytest.approx(2 * value)


def test_columns_of_logs_have_the_scales_of_their_programs():
    """nvidia-smi and DCGM give MiB and mJ, sar gives KiB: by their manuals."""
    tables = (log_columns.GPU_COLUMNS, log_columns.HOST_COLUMNS, log_columns.NIC_COLUMNS)
    scales = [{name: column.default_scale for name, column in table.items() if column.default_scale != 1} for table in tables]
    in_mib = ("memory.used", "memory.total", "fbttl", "fb_total", "fb", "fbusd", "fb_used")
    of_gpus = dict.fromkeys(in_mib, 2**20) | dict.fromkeys(("totec", "total_energy_consumption"), 1e-3)
    of_hosts = dict.fromkeys(("kbmemused", "memused"), 2**10)
    assert scales == [of_gpus, of_hosts, dict.fromkeys(("rxkb/s", "rxkb", "txkb/s", "txkb"), 2**10)]
