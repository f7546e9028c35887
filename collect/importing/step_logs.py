"""Reads steps of training: CSV, JSON lines, lines of torchtitan, nanotron and Megatron-LM, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from collect.importing.log_columns import STEP_COLUMNS, TIME_COLUMNS, normalize_name
from collect.importing.log_rows import LogRows
from collect.importing.log_values import MAGNITUDES
from shardlab.errors import MissingExtra
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.terminal import printable

_TITAN_STEP = re.compile(r"\bstep:\s*\d+\s+loss:")
_TITAN_PAIR = re.compile(r"([a-z_]+):\s*([-+.\w,]+)")
_TIME = re.compile(r"(?:\d{4}-\d{2}-\d{2}[ T]|\d{2}/\d{2} |\d{4}/\d{2}/\d{2} )\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?")
_RANK = re.compile(r"\[(?:default|rank)(\d{1,6})\]:")
_ITERATION = re.compile(r"\biteration:?\s+(\d+)\s*/\s*\d+ *\|(.*)")
WANDB_MAGIC, WANDB_BLOCK = b":W&B", 32_768
TENSORBOARD_MARK = b"brain.Event:"


def read_rows(rows: LogRows, records: Iterator[Mapping[str, Any] | None]) -> None:
    """Read steps from records with names and values; None is a line that could not be read. A record without the number of a
    step is a remark of the program, such as its configuration, and counts as not read."""
    for record in records:
        values = {normalize_name(name): value for name, value in (record or {}).items()}
        time_text = next((values[name] for name in TIME_COLUMNS if rows.clock.read_time(values.get(name)) is not None), None)
        rows.add_step(values, STEP_COLUMNS, time_text)


def list_csv_records(lines: Sequence[str], column_names: Sequence[str] | None) -> Iterator[Mapping[str, Any] | None]:
    """The lines of a CSV file. column_names: the names of the columns if the file has no heading."""
    delimiter = max(",;\t", key=lines[0].count) if lines else ","
    table = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    headings = list(column_names or next(table, []))
    for cells in table:
        yield dict(zip(headings, cells)) if len(cells) == len(headings) else None


def list_json_records(text: str, lines: Sequence[str]) -> Iterator[Mapping[str, Any] | None]:
    """The objects of JSON lines, or of the list `log_history` in a trainer_state.json of transformers."""
    if '"log_history"' in text:
        try:
            history = msgspec.json.decode(text)["log_history"]
            yield from (entry if isinstance(entry, dict) else None for entry in history)
            return
        except (*DECODE_FAULTS, TypeError, KeyError):
            pass
    for line in lines:
        try:
            record = msgspec.json.decode(line)
        except DECODE_FAULTS:
            record = None
        if line.strip():
            yield record if isinstance(record, dict) else None


def read_titan(log_rows: LogRows, lines: Sequence[str]) -> None:
    """Read lines of torchtitan: `step: 10  loss: 7.1  memory: 33.4GiB(42%)  tps: 5,123 ...`. Other lines are text."""
    for line in map(printable.replace_invisible, lines):
        if (match := _TITAN_STEP.search(line)) and "validate" not in line[: match.start()]:
            values = dict(_TITAN_PAIR.findall(line[match.start() :]))
            _add_text_step(log_rows, line, values)


def read_iterations(log_rows: LogRows, lines: Sequence[str]) -> None:
    """Read lines of nanotron (`iteration: 5 / 100 | lm_loss: 7.1 | ...`) and of Megatron-LM, which are alike."""
    for line in map(printable.replace_invisible, lines):
        if match := _ITERATION.search(line):
            pairs = (value_text.partition(":") for value_text in match[2].split("|"))
            values = {normalize_name(name): value.strip() for name, _, value in pairs}
            if "global_batch_size" in values and "tokens_per_sec" in values:
                values["tokens"] = values["global_batch_size"]  # nanotron counts its batch in tokens
            _add_text_step(log_rows, line, {"step": match[1], **values}, magnitudes=MAGNITUDES)


def _add_text_step(log_rows: LogRows, line: str, values: Mapping[str, Any], **options: Any) -> None:
    """Add a step of a line of text, which begins with its time and may name a rank."""
    time, rank = _TIME.search(line), _RANK.search(line)
    log_rows.add_step({**values, **({"rank": rank[1]} if rank else {})}, STEP_COLUMNS, time[0] if time else None, **options)


def list_tensorboard_records(path: Path, content: bytes) -> Iterator[Mapping[str, Any] | None]:
    """The steps in an event file of TensorBoard, whose messages its library reads. Raises MissingExtra if it is not installed.

    The file has, for each event, the length of the message, a checksum, the message, and another checksum."""
    event_type = _import_library("tensorboard.compat.proto.event_pb2", "tensorboard", path).Event
    records: dict[int, dict[str, Any]] = {}
    position = 0
    while position + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        event = _parse_message(event_type, content[position + 12 : position + 12 + length])
        position += 16 + length
        if event is None:
            yield None
            continue
        for value in event.summary.value:
            if (scalar := _read_scalar(value)) is not None:
                record = records.setdefault(event.step, {"step": event.step})
                record |= {"wall_time": event.wall_time, value.tag: scalar}
    yield from records.values()


def _read_scalar(value: Any) -> float | None:
    """The number in a value of a summary; None if it has none, such as an image."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    numbers = [*value.tensor.float_val, *value.tensor.double_val] if value.HasField("tensor") else []
    if not numbers and len(value.tensor.tensor_content) == 4:
        numbers = list(struct.unpack("<f", value.tensor.tensor_content))
    return float(numbers[0]) if len(numbers) == 1 else None


def list_wandb_records(path: Path, content: bytes) -> Iterator[Mapping[str, Any] | None]:
    """The rows in a file run-ID.wandb, whose messages its library reads. Raises MissingExtra if it is not installed.

    The file is a log of LevelDB: blocks of 32 KiB with parts of messages, each after its checksum, length and kind (1: a whole
    message, 2: its first part, 3: a middle part, 4: its last part)."""
    record_type = _import_library("wandb.proto.wandb_internal_pb2", "wandb", path).Record
    position, message = 7, b""
    while position + 7 <= len(content):
        if WANDB_BLOCK - position % WANDB_BLOCK < 7:
            position += WANDB_BLOCK - position % WANDB_BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        message_part = content[position + 7 : position + 7 + length]
        position += 7 + length
        message = message_part if kind in (1, 2) else message + message_part
        if kind not in (1, 4):
            continue
        record = _parse_message(record_type, message)
        if record is None:
            yield None
        elif record.history.item:
            values: dict[str, Any] = {"_step": record.history.step.num}
            for item in record.history.item:
                with contextlib.suppress(*DECODE_FAULTS):  # such as NaN, which is no JSON
                    values["/".join(filter(None, [item.key, *item.nested_key]))] = msgspec.json.decode(item.value_json)
            yield values


def _parse_message(message_type: Any, content: bytes) -> Any:
    """A message of protobuf; None if the content is none."""
    try:
        return message_type.FromString(content)
    except importlib.import_module("google.protobuf.message").DecodeError:
        return None


def _import_library(module: str, package: str, path: Path) -> Any:
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(f"collect import {path}", package)
    return importlib.import_module(module)
