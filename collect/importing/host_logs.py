"""Reads telemetry of hosts: sar, sadf (JSON, and lines with semicolons), values of psutil as CSV, and `ethtool -S`."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.importing.log_columns import HOST_COLUMNS, NIC_COLUMNS, TIME_COLUMNS, normalize_name
from collect.importing.log_rows import LogRows, set_field
from collect.sampler.ethtool import find_counters
from shardlab.record_types import LARGEST_INTEGER
from shardlab.runs.record import NicSample
from shardlab.terminal import printable

_SAR_HEAD = re.compile(r"Linux \S+ \((.{1,253}?)\)\s+(\S+)")
_SAR_TIME = re.compile(r"(\d{1,2}:\d{2}:\d{2})(?:\s+(AM|PM))?\s+(.*)")
_INTERFACE = re.compile(r"(?:eth|en[opsx]|ib|roce|bond|mlx|hsn|efa)[a-z0-9]*\d[a-z0-9]*")
_COUNTER_LINE = re.compile(r"\s+(\S.*?): (\d+)\s*")
MOST_COUNTERS = 1 << 16  # the most counters of one interface


def clean_host(name: str) -> str:
    """A name of a host that may be part of a path; other characters become hyphens."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".-")[:100] or "imported"


def read_sar(rows: LogRows, lines: Sequence[str]) -> None:
    """Read the text that sar prints: tables one after another, each with a line of headings that begins with a time."""
    names: list[str] = []
    for line in lines:
        if match := _SAR_HEAD.match(line):
            rows.host = clean_host(match[1])
            _set_sar_date(rows, match[2])
            continue
        if not line.strip() or line.startswith(("Average", "Summary")) or "LINUX RESTART" in line:
            continue
        match = _SAR_TIME.fullmatch(line.strip())
        cells = match[3].replace(",", ".").split() if match else []
        if match and cells and not any(cell[:1].isdigit() for cell in cells[1:]) and re.search("[A-Za-z%]", cells[-1]):
            names = [cell.lower() for cell in cells]
            continue
        if match is None or len(cells) != len(names):
            rows.unread += 1
            continue
        wall_s = rows.clock.read_time(" ".join(filter(None, match.groups()[:2])))
        rows.lacks_times |= wall_s is None
        if wall_s is not None:
            _add_sar_row(rows, wall_s, dict(zip(names, cells, strict=True)))


def _set_sar_date(rows: LogRows, text: str) -> None:
    """Read the date in the head of sar: year first, or the month before the day as in the United States."""
    numbers = [int(part) for part in re.findall(r"\d{1,4}", text)]
    if len(numbers) != 3:
        return
    year, month, day = numbers if numbers[0] > 31 else (numbers[2], *numbers[:2])
    if month > 12:
        month, day = day, month
    elif numbers[0] <= 12 and day <= 12 and month != day:
        rows.remarks.append(
            f"the date {text} is read as month/day; S_TIME_FORMAT=ISO makes sar print dates that have one meaning"
        )
    try:
        rows.clock.set_date(year + 2000 if year < 100 else year, month, day)
    except (ValueError, OverflowError):
        rows.remarks.append(f"the date {printable.clean_to_one_line(text)[:40]} in the head is none")


def _add_sar_row(rows: LogRows, wall_s: float, values: Mapping[str, object]) -> None:
    """Add a line of a table of sar. Of the processors, only the line for all of them together is used."""
    if "iface" in values:
        name = printable.clean_to_one_line(str(values["iface"]))[:64]
        rows.add_nic(wall_s, name, values, NIC_COLUMNS, "loopback" if name == "lo" else "physical")
    elif values.get("cpu") in (None, "all", "-1", -1):
        rows.add_host(wall_s, values, HOST_COLUMNS)


def read_sadf_lines(rows: LogRows, lines: Sequence[str]) -> None:
    """Read the output of `sadf -d`: fields with semicolons between them, and lines of headings that begin with #."""
    names: list[str] = []
    for line in lines:
        cells = line.lstrip("# ").rstrip("\n").split(";")
        if line.startswith("#"):
            names = [name.lower() for name in cells]
        elif "LINUX-RESTART" not in line and line.strip():
            values = dict(zip(names, (cell.replace(",", ".") for cell in cells)))
            wall_s = rows.clock.read_time(values.get("timestamp"))
            if wall_s is None or len(cells) != len(names):
                rows.unread += 1
                continue
            rows.host = clean_host(str(values["hostname"]))
            _add_sar_row(rows, wall_s, values)


def read_sadf_json(rows: LogRows, text: str) -> None:
    """Read the output of `sadf -j`. Raises msgspec.DecodeError, or one of KeyError, TypeError, AttributeError if it is not."""
    for host in msgspec.json.decode(text)["sysstat"]["hosts"]:
        rows.host = clean_host(str(host["nodename"]))
        for entry in host.get("statistics", ()):
            moment = entry.get("timestamp") or {}
            zone = " UTC" if moment.get("utc") or str(moment.get("tz", host.get("timezone"))) == "UTC" else ""
            wall_s = rows.clock.read_time(f"{moment.get('date')} {moment.get('time')}{zone}")
            if wall_s is None:
                rows.unread += 1
                continue
            for load in entry.get("cpu-load", entry.get("cpu-load-all", ())):
                _add_sar_row(rows, wall_s, load)
            _add_sar_row(rows, wall_s, {"kbmemused": entry.get("memory", {}).get("memused")})
            for interface in entry.get("network", {}).get("net-dev", ()):
                _add_sar_row(rows, wall_s, {name.lower(): value for name, value in interface.items()})


def read_psutil_csv(rows: LogRows, lines: Sequence[str], names: Sequence[str] | None) -> None:
    """Read a CSV file of values that psutil measured. Sums over all interfaces become one interface."""
    table = csv.reader(lines, skipinitialspace=True)
    headings = [normalize_name(name) for name in (names or next(table, []))]
    for cells in table:
        values: dict[str, Any] = dict(zip(headings, cells))
        time = next((values[name] for name in TIME_COLUMNS if name in values), None)
        wall_s = rows.start_moment(time, "host") if len(cells) == len(headings) else None
        if wall_s is None:
            rows.unread += 1
            continue
        rows.add_host(wall_s, values, HOST_COLUMNS)
        if any(name in NIC_COLUMNS for name in values):
            rows.add_nic(wall_s, "all interfaces", values, NIC_COLUMNS, "virtual")


def read_ethtool(rows: LogRows, lines: Sequence[str], file_stem: str) -> None:
    """Read snapshots of `ethtool -S`. A line before a snapshot may have its time, as `date` or a script prints it; the name of
    the interface is in the name of the file."""
    match = _INTERFACE.search(file_stem.lower())
    name, time, counters = match[0] if match else printable.clean_to_one_line(file_stem)[:64], None, dict[str, int]()
    for line in [*lines, "NIC statistics:"]:
        if line.strip() == "NIC statistics:":
            _add_counters(rows, name, time, counters)
            counters, time = {}, time if not counters else None
        elif (counter := _COUNTER_LINE.fullmatch(line)) and len(counters) < MOST_COUNTERS:
            counters[counter[1]] = min(int(counter[2][:20]), LARGEST_INTEGER)
        elif rows.clock.read_time(line) is not None:
            _add_counters(rows, name, time, counters)
            counters, time = {}, line
        else:
            rows.unread += bool(line.strip())


def _add_counters(rows: LogRows, name: str, time: str | None, counters: Mapping[str, int]) -> None:
    """Add a snapshot of counters. time: the line before it; None: none."""
    wall_s = rows.start_moment(time, name) if counters else None
    if wall_s is None:
        return
    rows.add_nic(wall_s, name, counters, NIC_COLUMNS, "physical")
    nic: NicSample = (rows.sample_at(wall_s).nics or [])[-1]
    driver_names = list(counters)
    for field, indexes in find_counters(driver_names).items():
        set_field(nic, field, sum(counters[driver_names[index]] for index in indexes))
