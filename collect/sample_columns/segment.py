"""The format of HOST.columns, which has segments: each repeats the samples of one part of HOST.jsonl as columns.

A segment is a line break, one line of JSON (`SegmentLine`), and the values of all columns, little-endian, table by table.
Samplers only append to the file. So after a segment that a killed sampler left incomplete, the next segment follows.

The digest of a segment is the SHA-256 of the lines in HOST.jsonl, of the JSON of the segment and of the values. So a segment is
used only if neither file was changed. The digest does not protect from a person who writes both files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from collect.sample_columns import tables
from collect.sample_columns.tables import ALWAYS, LISTED, Kind
from shardlab.files.decoders import DECODE_FAULTS, decoder
from shardlab.record_types import BootId, Count, HostName, Integer, Measured, Seconds, Sha256, WallTime

SCHEMA = 1
# How a segment begins. A reader searches for these bytes after a segment that it cannot read.
MAGIC = b'\n{"schema":%d,"sha256":"' % SCHEMA
# A segment is written when its lines in HOST.jsonl have this many bytes: about a quarter of an hour of 8 GPUs at 1 Hz. If the
# sampler is killed, a reader has to decode at most this many bytes of JSON, which takes 0.04 s. Larger segments would be loaded
# only a little faster, because the cost of a column is already small beside the cost of its values.
SEGMENT = 4 << 20
# Fewer bytes of JSON are decoded as fast as columns are read. So a short run, such as most runs of a sweep, has no columns.
LEAST = 1 << 20
MOST_LINE = 1 << 20  # the most bytes of the line of JSON of a segment
MOST_VALUES = 1 << 28  # the most bytes of the values of a segment
LEAST_ROW = 10  # a row of a table comes from at least this many bytes of HOST.jsonl
COUNTS: Mapping[str, Kind] = {"nics": "int", "gpus": "int", "rdma": "int"}  # columns: the number of devices in each sample
TABLES: Mapping[str, Mapping[str, Kind]] = {
    "hosts": {**tables.HOSTS, **COUNTS},
    "nics": tables.NICS,
    "gpus": {**tables.GPUS, **tables.OF_SAMPLES},
    "rdma": tables.RDMA,
}
_EXPECTED = {table: tuple(columns.items()) for table, columns in TABLES.items()}
WIDTHS = {"float": 8, "int": 8, "bool": 1}  # bytes of a value

Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_LISTS: Mapping[Kind, Any] = {
    "text": list[str | None],
    "float": list[Measured | None],
    "int": list[Count | None],
    "bool": list[bool | None],
    "texts": list[list[str] | None],
    "ints": list[list[Integer] | None],
}
# Columns whose values have another type than their kind. The types are those of `shardlab.runs.record.Sample`.
_NAMED: Mapping[str, Any] = {"host": list[HostName], "boot_id": list[BootId], "t_s": list[Seconds], "wall_s": list[WallTime]}
_DECODERS = {key: decoder(shape) for shapes in (_LISTS, _NAMED) for key, shape in shapes.items()}


class SegmentFault(Exception):
    """A segment that cannot be used. Its samples are then decoded from HOST.jsonl."""


class StoredColumn(msgspec.Struct, omit_defaults=True):
    """How the values of a column are stored."""

    name: str
    kind: Kind
    distinct: msgspec.Raw = msgspec.Raw()
    """The distinct values, and null among them if there is one. The values of the column are then codes: for each row the index
    of its value in `distinct`, in `code_width` bytes. Without `distinct`, the values are stored as they are, in WIDTHS bytes
    each."""
    nulls: bool = False
    """A byte for each row follows the values: 1 if the row has no value."""


class StoredTable(msgspec.Struct):
    """A table of a segment."""

    rows: Size
    """Its number of rows."""
    columns: list[StoredColumn]


class Segment(msgspec.Struct):
    """The samples between two places of HOST.jsonl as four tables."""

    begin: Size
    """The first byte."""
    end: Size
    """The byte after the last one."""
    tables: dict[str, StoredTable]


class SegmentLine(msgspec.Struct):
    """The line of JSON with which a segment begins."""

    schema: int
    sha256: Sha256
    """The digest (`Digest`)."""
    segment: msgspec.Raw
    """The JSON of a `Segment`."""


class PlacedColumn(msgspec.Struct, frozen=True):
    """Where the values of a column are."""

    kind: Kind
    distinct: list[Any] | None
    """The distinct values; None if the values are stored as they are."""
    nulls: bool
    at: int
    """The index of the first byte in the values of the segment."""
    width: int
    """Bytes of each value or code."""


class ReadSegment(msgspec.Struct, frozen=True):
    """A segment whose line was checked. Its values were not."""

    begin: int
    """As in `Segment`."""
    end: int
    """As in `Segment`."""
    rows: dict[str, int]
    """Table -> number of its rows."""
    columns: dict[str, dict[str, PlacedColumn]]
    """Table -> column -> where its values are."""
    size: int
    """Of all values in bytes."""
    sha256: str
    """The expected digest."""
    hashed: bytes
    """The JSON of the segment, which is part of the digest."""

    def last_wall_s(self, values: bytes) -> float:
        """The time of the last sample of the segment. values: the bytes of all values of the segment."""
        column, last = self.columns["hosts"]["wall_s"], self.rows["hosts"] - 1
        if column.distinct is not None:
            return float(column.distinct[0])
        return float(struct.unpack_from("<d", values, column.at + 8 * last)[0])


def code_width(distinct_count: int) -> int:
    """The bytes of the code of a row in a column with this many distinct values. 0: there is no choice, and no code."""
    return 0 if distinct_count < 2 else 1 if distinct_count <= 1 << 8 else 2 if distinct_count <= 1 << 16 else 4


def read_line(line: bytes) -> ReadSegment:
    """Check the line of JSON of a segment, which may come from anybody. Raises SegmentFault.

    After this check, all values are within `bytes`, and a table has no more rows than the part of HOST.jsonl can have.
    """
    try:
        found = decoder(SegmentLine).decode(line)
        segment = decoder(Segment).decode(found.segment)
    except DECODE_FAULTS as error:
        raise SegmentFault(str(error)) from None
    if segment.tables.keys() != TABLES.keys():
        raise SegmentFault("the tables are not those of this version")
    at = 0
    placed: dict[str, dict[str, PlacedColumn]] = {}
    for name, expected in _EXPECTED.items():
        table = segment.tables[name]
        if tuple((column.name, column.kind) for column in table.columns) != expected:
            raise SegmentFault(f"the columns of {name} are not those of this version")
        if table.rows > (segment.end - segment.begin) // LEAST_ROW or (name == "hosts" and not table.rows):
            raise SegmentFault(f"{table.rows} rows of {name}")
        placed[name] = {}
        for column in table.columns:
            one = placed[name][column.name] = _place_column(column, table.rows, at)
            at += table.rows * (one.width + one.nulls)
    if at > MOST_VALUES:
        raise SegmentFault(f"{at} bytes of values")
    rows = {name: table.rows for name, table in segment.tables.items()}
    return ReadSegment(segment.begin, segment.end, rows, placed, at, found.sha256, bytes(found.segment))


def _place_column(column: StoredColumn, rows: int, offset: int) -> PlacedColumn:
    kind, never_null = column.kind, column.name in ALWAYS or column.name in COUNTS
    if not bytes(column.distinct):
        if kind in LISTED or (column.nulls and (never_null or kind == "bool")):
            raise SegmentFault(f"{column.name} has no distinct values, or nulls")
        return PlacedColumn(kind, None, column.nulls, offset, WIDTHS[kind])
    try:
        distinct: list[Any] = _DECODERS[column.name if column.name in _NAMED else kind].decode(column.distinct)
    except DECODE_FAULTS as error:
        raise SegmentFault(f"{column.name}: {error}") from None
    if (
        bool(distinct) != bool(rows)
        or len(distinct) > (rows if kind in LISTED else 1)
        or column.nulls
        or (never_null and None in distinct)
    ):
        raise SegmentFault(f"{column.name} has {len(distinct)} distinct values in {rows} rows")
    return PlacedColumn(kind, distinct, False, offset, code_width(len(distinct)))


class Digest:
    """Computes the digest of a segment: first `add_lines` for the lines of HOST.jsonl, in parts, then `finish`."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add_lines(self, part: bytes | bytearray | memoryview) -> None:
        """Add a part of the lines of HOST.jsonl."""
        self._sha256.update(part)

    def finish(self, segment: bytes, values: bytes) -> str:
        """The digest. segment: the JSON of the segment. values: the bytes of all values."""
        self._sha256.update(segment)
        self._sha256.update(values)
        return self._sha256.hexdigest()
