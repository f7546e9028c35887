"""Turns segments of files of columns into frames. The values are checked first, because anybody may write such a file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from collect.sample_columns.segment import COUNTS, TABLES, PlacedColumn, ReadSegment, SegmentFault
from collect.sample_columns.tables import LISTED, Kind
from collect.sources.samples import KINDS, Samples, build_frames_of_tables, sort_samples

_NUMBERS: Mapping[str, Any] = {"float": np.dtype("<f8"), "int": np.dtype("<i8"), "bool": np.dtype("?")}
_BOUNDS = {"t_s": (0.0, 3e9), "wall_s": (0.0, 2.5e11)}  # of shardlab.record_types.Seconds and WallTime
_CODES: Mapping[int, Any] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class CheckedColumn(NamedTuple):
    """The values of a column of a segment. Either `distinct` with codes, or values."""

    distinct: list[Any] | None
    """The distinct values; None if the values are stored as they are."""
    values: np.ndarray | None
    """The values, or for each row the index of its value in `distinct`; None if there is only one distinct value."""
    nulls: np.ndarray | None
    """Whether a row has no value; None if all have one."""


class CheckedSegment(NamedTuple):
    """A segment whose values are allowed."""

    rows: dict[str, int]
    """Table -> number of its rows."""
    columns: dict[str, dict[str, CheckedColumn]]
    """Table -> column -> its values."""
    is_ordered: bool
    """Whether all samples are of one host and in the order of their times."""

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.rows["hosts"]


def check_segment(segment: ReadSegment, values: bytes) -> CheckedSegment:
    """Check the values of a segment. Raises SegmentFault if a value is not allowed. values: the bytes of all values."""
    columns = {
        table: {name: _check_column(name, column, segment.rows[table], values) for name, column in table_columns.items()}
        for table, table_columns in segment.columns.items()
    }
    for name in COUNTS:
        counts = _read_counts(columns["hosts"][name], segment.rows["hosts"])
        # Each count is compared with the number of rows before the counts are added, so the sum cannot overflow.
        if counts.min() < 0 or counts.max() > segment.rows[name] or counts.sum() != segment.rows[name]:
            raise SegmentFault(f"the numbers of {name} are not those of the samples")
    hosts, times = columns["hosts"]["host"].distinct, columns["hosts"]["wall_s"].values
    is_ordered = hosts is not None and len(hosts) == 1 and (times is None or bool((times[:-1] <= times[1:]).all()))
    return CheckedSegment(segment.rows, columns, is_ordered)


def build_segment_frames(segments: Sequence[CheckedSegment]) -> Samples:
    """The frames of the samples of some segments, in the form in which `samples.build_sample_part` makes them of records."""
    tables = {name: _build_frame(name, segments) for name in TABLES}
    hosts = tables["hosts"].drop(*COUNTS)
    hosts.insert_column(0, pl.zeros(hosts.height, pl.Int64, eager=True).alias("run"))
    samples = build_frames_of_tables(hosts, *((tables["hosts"][name].to_numpy(), tables[name]) for name in COUNTS))
    if not all(segment.is_ordered for segment in segments):
        return sort_samples(samples)
    end_rows = list(itertools.accumulate(segment.samples for segment in segments))
    sort_keys = hosts.select("host", "wall_s")
    edges = [(sort_keys.row(begin), sort_keys.row(end - 1)) for begin, end in itertools.pairwise([0, *end_rows])]
    return samples if all(last <= first for (_, last), (first, _) in itertools.pairwise(edges)) else sort_samples(samples)


def _check_column(name: str, column: PlacedColumn, rows: int, values: bytes) -> CheckedColumn:
    if column.distinct is not None:
        if not column.width:
            return CheckedColumn(column.distinct, None, None)
        codes = np.frombuffer(values, _CODES[column.width], rows, column.at)
        if int(codes.max()) >= len(column.distinct):
            raise SegmentFault(f"{name} has a code without a value")
        return CheckedColumn(column.distinct, codes, None)
    if column.kind == "bool":
        return CheckedColumn(None, _read_booleans(name, values, rows, column.at), None)
    numbers = np.frombuffer(values, _NUMBERS[column.kind], rows, column.at)
    least, most = _BOUNDS.get(name, (-1e150, 1e150) if column.kind == "float" else (0, 2**63 - 1))
    if not ((numbers >= least) & (numbers <= most)).all():
        raise SegmentFault(f"{name} has a number that a sample cannot have")
    nulls = _read_booleans(name, values, rows, column.at + 8 * rows) if column.nulls else None
    return CheckedColumn(None, numbers, nulls)


def _read_booleans(name: str, values: bytes, rows: int, offset: int) -> np.ndarray:
    booleans = np.frombuffer(values, np.uint8, rows, offset)
    if rows and int(booleans.max()) > 1:
        raise SegmentFault(f"{name} has a byte that is neither 0 nor 1")
    return booleans.view(np.bool_)


def _read_counts(column: CheckedColumn, rows: int) -> np.ndarray:
    if column.values is not None:
        return column.values
    assert column.distinct is not None
    return np.full(rows, column.distinct[0], np.int64)


def _build_frame(table: str, segments: Sequence[CheckedSegment]) -> pl.DataFrame:
    rows = [segment.rows[table] for segment in segments]
    columns = [segment.columns[table] for segment in segments]
    return pl.DataFrame(
        [_build_series(name, kind, [part[name] for part in columns], rows) for name, kind in TABLES[table].items()]
    )


def _build_series(name: str, kind: Kind, columns: Sequence[CheckedColumn], rows: Sequence[int]) -> pl.Series:
    """A column of all segments. rows: the number of rows of each segment."""
    if kind in LISTED:
        return _build_coded_series(name, kind, columns, rows)
    distinct_texts = {repr(column.distinct) for column in columns}  # as text, because 0.0 equals -0.0
    total_rows = sum(rows)
    if len(distinct_texts) == 1 and columns[0].distinct is not None and total_rows:
        return pl.Series(name, columns[0].distinct, KINDS[kind]).new_from_index(0, total_rows)
    parts = []
    for column, count in zip(columns, rows, strict=True):
        value = column.distinct[0] if column.distinct else 0
        fill_value = 0 if value is None else value  # and not `value or 0`, which makes 0.0 of -0.0
        parts.append(np.full(count, fill_value, _NUMBERS[kind]) if column.values is None else column.values)
    series = pl.Series(name, np.concatenate(parts), KINDS[kind])
    if not any(column.nulls is not None or column.distinct == [None] for column in columns):
        return series
    nulls = [
        np.full(count, column.distinct == [None]) if column.nulls is None else column.nulls
        for column, count in zip(columns, rows, strict=True)
    ]
    return series.set(pl.Series(np.concatenate(nulls)), None)


def _build_coded_series(name: str, kind: Kind, columns: Sequence[CheckedColumn], rows: Sequence[int]) -> pl.Series:
    index_of_value: dict[Any, int] = {}  # distinct value of all segments -> its index
    codes = []
    for column, count in zip(columns, rows, strict=True):
        distinct = [tuple(value) if isinstance(value, list) else value for value in column.distinct or ()]
        merged_codes = np.array([index_of_value.setdefault(value, len(index_of_value)) for value in distinct], np.uint32)
        codes.append(merged_codes.repeat(count) if column.values is None else merged_codes.take(column.values))
    distinct_values = [list(value) if isinstance(value, tuple) else value for value in index_of_value]
    series = pl.Series(name, distinct_values, KINDS[kind])
    # `new_from_index` takes ten times as long for lists
    is_same = len(index_of_value) == 1 and kind == "text"
    return series.new_from_index(0, sum(rows)) if is_same else series[np.concatenate(codes)]
