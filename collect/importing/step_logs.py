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

from collect.importing.log_columns import STEP_COLUMNS, TIME_COLUMNS, normalize_column_name
from collect.importing.log_rows import LogRows
from collect.importing.log_values import MAGNITUDES
from shardlab.errors import MissingExtra
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.terminal import printable

_TITAN_STEP_START = re.compile(r"\bstep:\s*\d+\s+loss:")
_TITAN_PAIR = re.compile(r"([a-z_]+):\s*([-+.\w,]+)")
_LINE_TIME = re.compile(r"(?:\d{4}-\d{2}-\d{2}[ T]|\d{2}/\d{2} |\d{4}/\d{2}/\d{2} )\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?")
_LINE_RANK = re.compile(r"\[(?:default|rank)(\d{1,6})\]:")
_ITERATION_LINE = re.compile(r"\biteration:?\s+(\d+)\s*/\s*\d+ *\|(.*)")
WANDB_MAGIC, WANDB_BLOCK = b":W&B", 32_768
TENSORBOARD_MARK = b"brain.Event:"


def read_step_records(rows: LogRows, records: Iterator[Mapping[str, Any] | None]) -> None:
    """Read steps from records with names and values; None is a line that could not be read. A record without the number of a
    step is a remark of the program, such as its configuration, and counts as not read."""
    for step_record in records:
        values = {normalize_column_name(name): value for name, value in (step_record or {}).items()}
        time_text = next((values[name] for name in TIME_COLUMNS if rows.clock.read_time(values.get(name)) is not None), None)
        rows.add_step(values, STEP_COLUMNS, time_text)


def list_csv_records(lines: Sequence[str], column_names: Sequence[str] | None) -> Iterator[Mapping[str, Any] | None]:
    """The lines of a CSV file. column_names: the names of the columns if the file has no heading."""
    delimiter = max(",;\t", key=lines[0].count) if lines else ","
    csv_rows = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    headings = list(column_names or next(csv_rows, []))
    for cell_texts in csv_rows:
        yield dict(zip(headings, cell_texts)) if len(cell_texts) == len(headings) else None


def list_json_records(json_text: str, lines: Sequence[str]) -> Iterator[Mapping[str, Any] | None]:
    """The objects of JSON lines, or of the list `log_history` in a trainer_state.json of transformers."""
    if '"log_history"' in json_text:
        try:
            log_history = msgspec.json.decode(json_text)["log_history"]
            yield from (history_entry if isinstance(history_entry, dict) else None for history_entry in log_history)
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


def read_titan_lines(log_rows: LogRows, lines: Sequence[str]) -> None:
    """Read lines of torchtitan: `step: 10  loss: 7.1  memory: 33.4GiB(42%)  tps: 5,123 ...`. Other lines are text."""
    for line in map(printable.replace_invisible, lines):
        if (step_match := _TITAN_STEP_START.search(line)) and "validate" not in line[: step_match.start()]:
            text_by_name = dict(_TITAN_PAIR.findall(line[step_match.start() :]))
            _add_text_step(log_rows, line, text_by_name)


def read_iteration_lines(log_rows: LogRows, lines: Sequence[str]) -> None:
    """Read lines of nanotron (`iteration: 5 / 100 | lm_loss: 7.1 | ...`) and of Megatron-LM, which are alike."""
    for line in map(printable.replace_invisible, lines):
        if iteration_match := _ITERATION_LINE.search(line):
            partitioned_pairs = (value_text.partition(":") for value_text in iteration_match[2].split("|"))
            text_by_name = {normalize_column_name(name): value.strip() for name, _, value in partitioned_pairs}
            if "global_batch_size" in text_by_name and "tokens_per_sec" in text_by_name:
                text_by_name["tokens"] = text_by_name["global_batch_size"]  # nanotron counts its batch in tokens
            _add_text_step(log_rows, line, {"step": iteration_match[1], **text_by_name}, factor_by_magnitude=MAGNITUDES)


def _add_text_step(log_rows: LogRows, line: str, values: Mapping[str, Any], **options: Any) -> None:
    """Add a step of a line of text, which begins with its time and may name a rank."""
    time_match, rank_match = _LINE_TIME.search(line), _LINE_RANK.search(line)
    log_rows.add_step(
        {**values, **({"rank": rank_match[1]} if rank_match else {})},
        STEP_COLUMNS,
        time_match[0] if time_match else None,
        **options,
    )


def list_tensorboard_records(path: Path, content: bytes) -> Iterator[Mapping[str, Any] | None]:
    """The steps in an event file of TensorBoard, whose messages its library reads. Raises MissingExtra if it is not installed.

    The file has, for each event, the length of the message, a checksum, the message, and another checksum."""
    event_type = _import_tracker_library("tensorboard.compat.proto.event_pb2", "tensorboard", path).Event
    record_by_step: dict[int, dict[str, Any]] = {}
    read_position = 0
    while read_position + 12 <= len(content):
        (message_bytes,) = struct.unpack_from("<Q", content, read_position)
        event = _parse_message(event_type, content[read_position + 12 : read_position + 12 + message_bytes])
        read_position += 16 + message_bytes
        if event is None:
            yield None
            continue
        for summary_value in event.summary.value:
            if (scalar := _read_scalar(summary_value)) is not None:
                step_record = record_by_step.setdefault(event.step, {"step": event.step})
                step_record |= {"wall_time": event.wall_time, summary_value.tag: scalar}
    yield from record_by_step.values()


def _read_scalar(summary_value: Any) -> float | None:
    """The number in a value of a summary; None if it has none, such as an image."""
    if summary_value.HasField("simple_value"):
        return float(summary_value.simple_value)
    numbers = [*summary_value.tensor.float_val, *summary_value.tensor.double_val] if summary_value.HasField("tensor") else []
    if not numbers and len(summary_value.tensor.tensor_content) == 4:
        numbers = list(struct.unpack("<f", summary_value.tensor.tensor_content))
    return float(numbers[0]) if len(numbers) == 1 else None


def list_wandb_records(path: Path, content: bytes) -> Iterator[Mapping[str, Any] | None]:
    """The rows in a file run-ID.wandb, whose messages its library reads. Raises MissingExtra if it is not installed.

    The file is a log of LevelDB: blocks of 32 KiB with parts of messages, each after its checksum, length and kind (1: a whole
    message, 2: its first part, 3: a middle part, 4: its last part)."""
    record_type = _import_tracker_library("wandb.proto.wandb_internal_pb2", "wandb", path).Record
    read_position, message = 7, b""
    while read_position + 7 <= len(content):
        if WANDB_BLOCK - read_position % WANDB_BLOCK < 7:
            read_position += WANDB_BLOCK - read_position % WANDB_BLOCK
            continue
        _, part_bytes, part_kind = struct.unpack_from("<IHB", content, read_position)
        message_part = content[read_position + 7 : read_position + 7 + part_bytes]
        read_position += 7 + part_bytes
        message = message_part if part_kind in (1, 2) else message + message_part
        if part_kind not in (1, 4):
            continue
        wandb_record = _parse_message(record_type, message)
        if wandb_record is None:
            yield None
        elif wandb_record.history.item:
            value_by_key: dict[str, Any] = {"_step": wandb_record.history.step.num}
            for item in wandb_record.history.item:
                with contextlib.suppress(*DECODE_FAULTS):  # such as NaN, which is no JSON
                    value_by_key["/".join(filter(None, [item.key, *item.nested_key]))] = msgspec.json.decode(item.value_json)
            yield value_by_key


def _parse_message(message_type: Any, message_bytes: bytes) -> Any:
    """A message of protobuf; None if the content is none."""
    try:
        return message_type.FromString(message_bytes)
    except importlib.import_module("google.protobuf.message").DecodeError:
        return None


def _import_tracker_library(module_name: str, package_name: str, log_path: Path) -> Any:
    if importlib.util.find_spec(package_name) is None:
        raise MissingExtra(f"collect import {log_path}", package_name)
    return importlib.import_module(module_name)
