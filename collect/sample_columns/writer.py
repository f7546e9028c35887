"""Writes the file of columns beside the record file of a sampler, segment by segment."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from collect.sample_columns import tables
from collect.sample_columns.segment import (
    LEAST,
    MAGIC,
    MOST_LINE,
    SEGMENT,
    TABLES,
    Digest,
    Segment,
    StoredColumn,
    StoredTable,
    code_width,
)
from collect.sample_columns.tables import LISTED, Kind
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, decoder
from shardlab.runs.part_files import COLUMNS
from shardlab.runs.record import Record, Sample

# Lines that are decoded at a time: this takes 8 ms, so that the next sample is not late, and each call serves many values.
BATCH = 100
_CODES = {0: "B", 1: "B", 2: "H", 4: "I"}  # width of a code in bytes -> type code of `array`


class ColumnsWriter:
    """Writes segments of the samples that a sampler writes to its record file.

    The samples are taken from the lines and not from the sampler's objects, so that the columns have what a reader of the lines
    gets: NaN, for example, is null in JSON. The memory is limited by SEGMENT.
    """

    def __init__(self, records: Path, begin: int) -> None:
        """records: the record file. The file of columns is created beside it when the first segment is written. begin: the
        size of the record file."""
        self.error: OSError | None = None  # why nothing more is written; the record file has all samples all the same
        self._path = records.with_name(records.name.removesuffix(".jsonl") + COLUMNS)
        self._end, self._has_written = begin, False
        self._start_segment()

    def add(self, line: bytes) -> None:
        """Take a line that was appended to the record file."""
        if self.error is not None:
            return
        self._waiting.append(line)
        self._end += len(line)
        if len(self._waiting) == BATCH:
            self._collect_lines()
            if self._end - self._begin >= SEGMENT:
                self._write_segment()

    def close(self) -> None:
        """Write the last segment, unless the record file is short."""
        if self.error is None and (self._has_written or self._end - self._begin >= LEAST):
            self._collect_lines()
            self._write_segment()

    def _start_segment(self) -> None:
        self._begin, self._digest, self._waiting = self._end, Digest(), list[bytes]()
        self._tables = {name: _TableColumns(columns) for name, columns in TABLES.items()}
        self._is_sound = True

    def _collect_lines(self) -> None:
        """Move the values of the lines that wait into the columns."""
        lines = b"".join(self._waiting)
        self._waiting = []
        if not lines or not self._is_sound:
            return
        self._digest.add_lines(lines)
        try:
            samples = decoder(Sample).decode_lines(lines)
            devices_by_sample = [(sample.nics or (), sample.gpus or (), sample.rdma or ()) for sample in samples]
            devices = [
                [device for device_list in device_lists for device in device_list]
                for device_lists in zip(*devices_by_sample, strict=True)
            ]
            counts = zip(*(map(len, sample_devices) for sample_devices in devices_by_sample), strict=True)
            self._tables["hosts"].extend(samples, counts)
            for name, records, extra_columns in zip(
                ("nics", "gpus", "rdma"), devices, ((), tables.gpu_sample_columns(samples), ()), strict=True
            ):
                self._tables[name].extend(records, extra_columns)
        except (*DECODE_FAULTS, OverflowError, TypeError):  # such as an integer of more than 64 bits: JSON has any
            self._is_sound = False

    def _write_segment(self) -> None:
        """Append a segment with all lines since the last segment. If the lines cannot be one, a reader decodes them."""
        if self._is_sound and self._end > self._begin:
            stored = {name: table.encode() for name, table in self._tables.items()}
            tables_by_name = {
                name: StoredTable(self._tables[name].rows, [column for column, _ in columns])
                for name, columns in stored.items()
            }
            values = b"".join(part for columns in stored.values() for _, part in columns)
            segment = msgspec.json.encode(Segment(self._begin, self._end, tables_by_name))
            line = MAGIC + self._digest.finish(segment, values).encode() + b'","segment":' + segment + b"}\n"
            if len(line) <= MOST_LINE:
                try:
                    files.append(self._path, line + values)
                    self._has_written = True
                except OSError as error:
                    self.error = error
        self._start_segment()


class _TableColumns:
    """The columns of a table of the segment that is being collected."""

    def __init__(self, columns: Mapping[str, Kind]) -> None:
        self.rows = 0
        self._columns = [_CollectedColumn(name, kind) for name, kind in columns.items()]
        self._names = tuple(columns)

    def extend(self, records: Sequence[Record], extra_columns: Iterable[Sequence[Any]]) -> None:
        """Append a row for each record. extra_columns: the values of the last columns, which are no fields of the records."""
        extra_values = list(extra_columns)
        field_count = len(self._columns) - len(extra_values)
        if records:
            values = [*zip(*map(attrgetter(*self._names[:field_count]), records), strict=True), *extra_values]
            for column, column_values in zip(self._columns, values, strict=True):
                column.extend(column_values)
            self.rows += len(records)

    def encode(self) -> list[tuple[StoredColumn, bytes]]:
        return [column.encode() for column in self._columns]


class _CollectedColumn:
    """The values of a column so far."""

    def __init__(self, name: str, kind: Kind) -> None:
        self._name, self._kind = name, kind
        self._distinct: dict[Any, int] = {}  # value -> its code, for kinds that are stored with codes
        self._values: array[Any] = array("I" if kind in LISTED else "d" if kind == "float" else "q" if kind == "int" else "B")
        self._nulls = bytearray()  # 1 for each row without a value; the end may be missing if it is 0
        self._has_value = False

    def extend(self, values: Sequence[Any]) -> None:
        if self._kind in LISTED:
            self._values.extend(array("I", self._codes(values)))
            return
        absent = values.count(None)
        if absent:
            self._nulls += bytes(len(self._values) - len(self._nulls))
        if absent == len(values):
            self._nulls += b"\1" * absent
            self._values.frombytes(bytes(absent * self._values.itemsize))
            return
        self._has_value = True
        if absent:
            self._nulls += bytes([value is None for value in values])
            values = [0 if value is None else value for value in values]
        self._values.extend(array(self._values.typecode, values))

    def _codes(self, values: Sequence[Any]) -> list[int]:
        if self._kind != "text":
            values = [None if value is None else tuple(value) for value in values]
        try:
            return [self._distinct[value] for value in values]
        except KeyError:  # there are new values
            return [self._distinct.setdefault(value, len(self._distinct)) for value in values]

    def encode(self) -> tuple[StoredColumn, bytes]:
        """The column in the form in which it is stored. If all rows have the same value, it is stored once."""
        column = StoredColumn(self._name, self._kind)
        if self._kind in LISTED:
            column.distinct = msgspec.Raw(msgspec.json.encode(list(self._distinct)))
            width = code_width(len(self._distinct))
            return column, _little_endian_bytes(array(_CODES[width], self._values)) if width else b""
        if not self._values:
            return column, b""
        if not self._has_value:
            column.distinct = msgspec.Raw(b"[null]")
            return column, b""
        content = _little_endian_bytes(self._values)
        first = content[: self._values.itemsize]
        if not self._nulls and content == first * len(self._values):  # as bytes, because 0.0 equals -0.0
            value = bool(self._values[0]) if self._kind == "bool" else self._values[0]
            column.distinct = msgspec.Raw(msgspec.json.encode([value]))
            return column, b""
        column.nulls = bool(self._nulls)
        return column, content + (bytes(self._nulls).ljust(len(self._values), b"\0") if self._nulls else b"")


def _little_endian_bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()
