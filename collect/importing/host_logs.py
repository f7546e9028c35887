"""Reads telemetry of hosts: sar, sadf (JSON, and lines with semicolons), values of psutil as CSV, and `ethtool -S`."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.importing.log_columns import HOST_COLUMNS, NIC_COLUMNS, TIME_COLUMNS, normalize_column_name
from collect.importing.log_rows import LogRows, set_record_field
from collect.sampler.ethtool import find_counters
from shardlab.record_types import LARGEST_INTEGER
from shardlab.runs.record import NicSample
from shardlab.terminal import printable

_SAR_HEAD_LINE = re.compile(r"Linux \S+ \((.{1,253}?)\)\s+(\S+)")
_SAR_TABLE_LINE = re.compile(r"(\d{1,2}:\d{2}:\d{2})(?:\s+(AM|PM))?\s+(.*)")
_INTERFACE_NAME = re.compile(r"(?:eth|en[opsx]|ib|roce|bond|mlx|hsn|efa)[a-z0-9]*\d[a-z0-9]*")
_COUNTER_LINE = re.compile(r"\s+(\S.*?): (\d+)\s*")
MOST_COUNTERS = 1 << 16  # the most counters of one interface


def clean_host_name(host_name: str) -> str:
    """A name of a host that may be part of a path; other characters become hyphens."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", host_name).lstrip(".-")[:100] or "imported"


def read_sar(log_rows: LogRows, lines: Sequence[str]) -> None:
    """Read the text that sar prints: tables one after another, each with a line of headings that begins with a time."""
    column_names: list[str] = []
    for line in lines:
        if line_match := _SAR_HEAD_LINE.match(line):
            log_rows.host = clean_host_name(line_match[1])
            _set_sar_date(log_rows, line_match[2])
            continue
        if not line.strip() or line.startswith(("Average", "Summary")) or "LINUX RESTART" in line:
            continue
        line_match = _SAR_TABLE_LINE.fullmatch(line.strip())
        cells = line_match[3].replace(",", ".").split() if line_match else []
        if line_match and cells and not any(cell[:1].isdigit() for cell in cells[1:]) and re.search("[A-Za-z%]", cells[-1]):
            column_names = [cell.lower() for cell in cells]
            continue
        if line_match is None or len(cells) != len(column_names):
            log_rows.unread_count += 1
            continue
        wall_s = log_rows.clock.read_time(" ".join(filter(None, line_match.groups()[:2])))
        log_rows.lacks_times |= wall_s is None
        if wall_s is not None:
            _add_sar_row(log_rows, wall_s, dict(zip(column_names, cells, strict=True)))


def _set_sar_date(log_rows: LogRows, date_text: str) -> None:
    """Read the date in the head of sar: year first, or the month before the day as in the United States."""
    date_numbers = [int(date_part) for date_part in re.findall(r"\d{1,4}", date_text)]
    if len(date_numbers) != 3:
        return
    year, month, day = date_numbers if date_numbers[0] > 31 else (date_numbers[2], *date_numbers[:2])
    if month > 12:
        month, day = day, month
    elif date_numbers[0] <= 12 and day <= 12 and month != day:
        log_rows.remarks.append(
            f"the date {date_text} is read as month/day; S_TIME_FORMAT=ISO makes sar print dates that have one meaning"
        )
    try:
        log_rows.clock.set_date(year + 2000 if year < 100 else year, month, day)
    except (ValueError, OverflowError):
        log_rows.remarks.append(f"the date {printable.clean_to_one_line(date_text)[:40]} in the head is none")


def _add_sar_row(log_rows: LogRows, wall_s: float, values: Mapping[str, object]) -> None:
    """Add a line of a table of sar. Of the processors, only the line for all of them together is used."""
    if "iface" in values:
        interface_name = printable.clean_to_one_line(str(values["iface"]))[:64]
        log_rows.add_nic(wall_s, interface_name, values, NIC_COLUMNS, "loopback" if interface_name == "lo" else "physical")
    elif values.get("cpu") in (None, "all", "-1", -1):
        log_rows.add_host(wall_s, values, HOST_COLUMNS)


def read_sadf_lines(log_rows: LogRows, lines: Sequence[str]) -> None:
    """Read the output of `sadf -d`: fields with semicolons between them, and lines of headings that begin with #."""
    column_names: list[str] = []
    for line in lines:
        cell_texts = line.lstrip("# ").rstrip("\n").split(";")
        if line.startswith("#"):
            column_names = [name.lower() for name in cell_texts]
        elif "LINUX-RESTART" not in line and line.strip():
            value_by_column = dict(zip(column_names, (cell.replace(",", ".") for cell in cell_texts)))
            wall_s = log_rows.clock.read_time(value_by_column.get("timestamp"))
            if wall_s is None or len(cell_texts) != len(column_names):
                log_rows.unread_count += 1
                continue
            log_rows.host = clean_host_name(str(value_by_column["hostname"]))
            _add_sar_row(log_rows, wall_s, value_by_column)


def read_sadf_json(log_rows: LogRows, json_text: str) -> None:
    """Read the output of `sadf -j`. Raises msgspec.DecodeError, or one of KeyError, TypeError, AttributeError if it is not."""
    for host in msgspec.json.decode(json_text)["sysstat"]["hosts"]:
        log_rows.host = clean_host_name(str(host["nodename"]))
        for moment_statistics in host.get("statistics", ()):
            time_fields = moment_statistics.get("timestamp") or {}
            zone_suffix = " UTC" if time_fields.get("utc") or str(time_fields.get("tz", host.get("timezone"))) == "UTC" else ""
            wall_s = log_rows.clock.read_time(f"{time_fields.get('date')} {time_fields.get('time')}{zone_suffix}")
            if wall_s is None:
                log_rows.unread_count += 1
                continue
            for cpu_load in moment_statistics.get("cpu-load", moment_statistics.get("cpu-load-all", ())):
                _add_sar_row(log_rows, wall_s, cpu_load)
            _add_sar_row(log_rows, wall_s, {"kbmemused": moment_statistics.get("memory", {}).get("memused")})
            for interface_fields in moment_statistics.get("network", {}).get("net-dev", ()):
                _add_sar_row(log_rows, wall_s, {name.lower(): value for name, value in interface_fields.items()})


def read_psutil_csv(log_rows: LogRows, lines: Sequence[str], column_names: Sequence[str] | None) -> None:
    """Read a CSV file of values that psutil measured. Sums over all interfaces become one interface."""
    csv_rows = csv.reader(lines, skipinitialspace=True)
    headings = [normalize_column_name(name) for name in (column_names or next(csv_rows, []))]
    for cell_texts in csv_rows:
        value_by_column: dict[str, Any] = dict(zip(headings, cell_texts))
        time_text = next((value_by_column[name] for name in TIME_COLUMNS if name in value_by_column), None)
        wall_s = log_rows.start_moment(time_text, "host") if len(cell_texts) == len(headings) else None
        if wall_s is None:
            log_rows.unread_count += 1
            continue
        log_rows.add_host(wall_s, value_by_column, HOST_COLUMNS)
        if any(name in NIC_COLUMNS for name in value_by_column):
            log_rows.add_nic(wall_s, "all interfaces", value_by_column, NIC_COLUMNS, "virtual")


def read_ethtool(log_rows: LogRows, lines: Sequence[str], file_stem: str) -> None:
    """Read snapshots of `ethtool -S`. A line before a snapshot may have its time, as `date` or a script prints it; the name of
    the interface is in the name of the file."""
    interface_match, time_line, value_by_counter = _INTERFACE_NAME.search(file_stem.lower()), None, dict[str, int]()
    interface_name = interface_match[0] if interface_match else printable.clean_to_one_line(file_stem)[:64]
    for line in [*lines, "NIC statistics:"]:
        if line.strip() == "NIC statistics:":
            _add_counter_snapshot(log_rows, interface_name, time_line, value_by_counter)
            value_by_counter, time_line = {}, time_line if not value_by_counter else None
        elif (counter_match := _COUNTER_LINE.fullmatch(line)) and len(value_by_counter) < MOST_COUNTERS:
            value_by_counter[counter_match[1]] = min(int(counter_match[2][:20]), LARGEST_INTEGER)
        elif log_rows.clock.read_time(line) is not None:
            _add_counter_snapshot(log_rows, interface_name, time_line, value_by_counter)
            value_by_counter, time_line = {}, line
        else:
            log_rows.unread_count += bool(line.strip())


def _add_counter_snapshot(log_rows: LogRows, interface_name: str, time_line: str | None, counters: Mapping[str, int]) -> None:
    """Add a snapshot of counters. time_line: the line before it; None: none."""
    wall_s = log_rows.start_moment(time_line, interface_name) if counters else None
    if wall_s is None:
        return
    log_rows.add_nic(wall_s, interface_name, counters, NIC_COLUMNS, "physical")
    nic_sample: NicSample = (log_rows.find_or_add_sample(wall_s).nics or [])[-1]
    driver_names = list(counters)
    for sample_field, counter_indexes in find_counters(driver_names).items():
        set_record_field(nic_sample, sample_field, sum(counters[driver_names[index]] for index in counter_indexes))
