"""Recognizes the format of a log of another program from its content, and reads the log."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from collect.importing import gpu_logs, host_logs, step_logs
from collect.importing.log_columns import HOST_COLUMNS, STEP_COLUMNS, normalize_column_name
from collect.importing.log_rows import LogRows
from collect.sources import plain_pickle, snapshot
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.terminal import printable

MOST_BYTES = 1 << 28  # the largest log that is read
LONGEST_LINE = 1 << 16  # a longer line of a log is not read
HEAD_LINES = 200  # the format is recognized from the first lines; logs of training begin with many lines of text
_STEP_COLUMN_NAMES = {name for name, column in STEP_COLUMNS.items() if column.field == "step"}


class LogContent(NamedTuple):
    """A log that was read into memory."""

    path: Path
    content: bytes
    text: str
    """Empty if the log is not text."""
    lines: Sequence[str]
    """Without those that are too long."""
    column_names: Sequence[str] | None
    """The names of the columns, as the option --columns states them."""

    @property
    def head(self) -> str:
        """The first lines, without colours."""
        return printable.replace_invisible("\n".join(self.lines[:HEAD_LINES]))

    def list_headings(self) -> list[str]:
        """The cells of the first line, or the names of --columns."""
        first_line = next(filter(str.strip, self.lines), "")
        try:
            return list(self.column_names or next(csv.reader([first_line], delimiter=max(",;\t", key=first_line.count))))
        except (csv.Error, StopIteration):
            return []


class LogFormat(NamedTuple):
    """A format of logs."""

    title: str
    """The program that writes it, in words."""
    matches: Callable[[LogContent], Any]
    """Whether a log looks as if it had this format."""
    read: Callable[[LogContent, LogRows], None]
    """Reads a log of this format."""


def _has(head_pattern: str) -> Callable[[LogContent], Any]:
    expression = re.compile(head_pattern, re.MULTILINE)
    return lambda log_content: expression.search(log_content.head)


def _has_columns(column_names: Iterable[str]) -> Callable[[LogContent], bool]:
    known_names = frozenset(column_names)
    return lambda log_content: not known_names.isdisjoint(map(normalize_column_name, log_content.list_headings()))


# Name -> format. The order matters: a log has the first format that matches.
FORMATS = {
    "wandb": LogFormat(
        "Weights & Biases (run-ID.wandb)",
        lambda log: log.content.startswith(step_logs.WANDB_MAGIC),
        lambda log, rows: step_logs.read_step_records(rows, step_logs.list_wandb_records(log.path, log.content)),
    ),
    "tensorboard": LogFormat(
        "TensorBoard (events.out.tfevents)",
        lambda log: step_logs.TENSORBOARD_MARK in log.content[:64],
        lambda log, rows: step_logs.read_step_records(rows, step_logs.list_tensorboard_records(log.path, log.content)),
    ),
    "sadf-json": LogFormat(
        "sadf -j", _has(r'^\s*\{\s*"sysstat"'), lambda log, rows: host_logs.read_sadf_json(rows, log.text)
    ),
    "sadf": LogFormat("sadf -d", _has(r"^# ?hostname;interval;"), lambda log, rows: host_logs.read_sadf_lines(rows, log.lines)),
    "sar": LogFormat("sar", _has(r"\A\s*Linux \S+ \(.*\)\s+\S*\d"), lambda log, rows: host_logs.read_sar(rows, log.lines)),
    "dcgm-exporter": LogFormat(
        "dcgm-exporter", _has(r"^DCGM_FI_\w+\{"), lambda log, rows: gpu_logs.read_exporter_text(rows, log.lines)
    ),
    "dcgmi-dmon": LogFormat("dcgmi dmon", _has(r"^# ?Entity\s"), lambda log, rows: gpu_logs.read_dmon_table(rows, log.lines)),
    "pmon": LogFormat(
        "nvidia-smi pmon", _has(r"^#.*\bgpu\b[\s,]+pid\b"), lambda log, rows: gpu_logs.read_dmon_table(rows, log.lines)
    ),
    "dmon": LogFormat("nvidia-smi dmon", _has(r"^#.*\bgpu[\s,]"), lambda log, rows: gpu_logs.read_dmon_table(rows, log.lines)),
    "ethtool": LogFormat(
        "ethtool -S", _has(r"^NIC statistics:"), lambda log, rows: host_logs.read_ethtool(rows, log.lines, log.path.stem)
    ),
    "torchtitan": LogFormat(
        "torchtitan", _has(r"\bstep:\s*\d+\s.*\bloss:"), lambda log, rows: step_logs.read_titan_lines(rows, log.lines)
    ),
    "iterations": LogFormat(
        "nanotron or Megatron-LM", _has(r"\biteration:?\s+\d+\s*/\s*\d+ *\|"),
        lambda log, rows: step_logs.read_iteration_lines(rows, log.lines),
    ),
    "json-steps": LogFormat(
        "steps as JSON lines", _has(r"\A\s*\{"),
        lambda log, rows: step_logs.read_step_records(rows, step_logs.list_json_records(log.text, log.lines)),
    ),
    "nvidia-smi": LogFormat(
        "nvidia-smi --query-gpu (CSV)",
        lambda log: any(map(gpu_logs.is_query_heading, (*log.lines[:HEAD_LINES], ",".join(log.column_names or ())))),
        lambda log, rows: gpu_logs.read_query_csv(rows, log.lines, log.column_names),
    ),
    "csv-steps": LogFormat(
        "steps as CSV", _has_columns(_STEP_COLUMN_NAMES),
        lambda log, rows: step_logs.read_step_records(rows, step_logs.list_csv_records(log.lines, log.column_names)),
    ),
    "psutil": LogFormat(
        "values of psutil (CSV)", _has_columns(HOST_COLUMNS),
        lambda log, rows: host_logs.read_psutil_csv(rows, log.lines, log.column_names),
    ),
}  # fmt: skip
SNAPSHOT = "memory-snapshot"
FORMAT_NAMES = (*FORMATS, SNAPSHOT)


def read_log_text(path: Path, column_names: Sequence[str] | None = None) -> tuple[LogContent, int]:
    """Read a file into memory. Returns (the log, the number of its lines that are too long). Raises WorkspaceError."""
    with files.as_workspace_error("read"):
        return _decode_log(path, files.read(path, MOST_BYTES, follow_links=True), column_names)


def _decode_log(path: Path, file_content: bytes, column_names: Sequence[str] | None) -> tuple[LogContent, int]:
    encoding = "utf-16" if file_content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # PowerShell writes UTF-16
    is_text = b"\0" not in file_content[:1024] or encoding == "utf-16"
    log_text = file_content.decode(encoding, "replace") if is_text else ""
    all_lines = log_text.splitlines()
    short_lines = [line for line in all_lines if len(line) <= LONGEST_LINE]
    return LogContent(path, file_content, log_text, short_lines, column_names), len(all_lines) - len(short_lines)


def refuse_importable_log(path: Path) -> None:
    """Raises InputError if a file, which should be a trace, is a log that `collect import` reads. A trace is JSON, maybe
    compressed."""
    try:
        with files.open_regular(path, follow_links=True) as file:
            log_content, _ = _decode_log(path, file.read(LONGEST_LINE), None)
    except OSError:
        return
    format_name = recognize_format(log_content) if log_content.content.lstrip()[:1] not in b"{[\x1f" else None
    if format_name in FORMATS:
        raise InputError(
            f"{path}: is a log of {FORMATS[format_name].title}, not a trace. `collect import {path}` makes a run of it."
        )


def recognize_format(log_content: LogContent) -> str | None:
    """The name of the format of a log, from its content; None if it has none of FORMAT_NAMES."""
    if log_content.content[:1] == plain_pickle.PICKLE_MAGIC or log_content.path.name.endswith(snapshot.SNAPSHOT_SUFFIX):
        return SNAPSHOT
    return next((format_name for format_name, log_format in FORMATS.items() if log_format.matches(log_content)), None)


def read_log(log: LogContent, format_name: str, log_rows: LogRows) -> None:
    """Read a log in a format of FORMATS. Raises InputError if its structure is not that of the format."""
    try:
        FORMATS[format_name].read(log, log_rows)
    except (*DECODE_FAULTS, msgspec.MsgspecError, csv.Error, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{log.path}: cannot be read as {FORMATS[format_name].title}: {str(error)[:200]}. Allowed: another format (--as)."
        ) from None
