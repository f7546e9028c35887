"""Turns a segment of a file of columns into frames, and checks its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from collect.sample_columns.segment import COUNTS, PlacedColumn, ReadSegment, SegmentFault
from collect.sources.samples import KINDS, Samples, in_order, of_tables

_NUMBERS: Mapping[str, Any] = {"float": np.dtype("<f8"), "int": np.dtype("<i8"), "bool": np.dtype("u1")}
_CODES: Mapping[int, Any] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def of_segment(segment: ReadSegment, values: bytes) -> Samples:
    """The frames of the samples of a segment, as `samples.part` makes them of records. values: the values of the segment.

    Raises SegmentFault if a value is not allowed.
    """
    tables = {name: _frame(columns, segment.rows[name], values) for name, columns in segment.columns.items()}
    hosts = tables["hosts"].drop(*COUNTS).insert_column(0, pl.zeros(segment.rows["hosts"], pl.Int64, eager=True).alias("run"))
    devices = []
    for name in COUNTS:
        counts = tables["hosts"][name].to_numpy()
        # No count is larger than the sum may be, so the sum does not overflow.
        if counts.min() < 0 or counts.max() > segment.rows[name] or counts.sum() != segment.rows[name]:
            raise SegmentFault(f"the numbers of {name} are not those of the samples")
        devices.append((counts, tables[name]))
    found = of_tables(hosts, *devices)
    times = hosts["wall_s"].to_numpy()
    is_ordered = segment.columns["hosts"]["host"].width == 0 and bool((times[:-1] <= times[1:]).all())
    return found if is_ordered else in_order(found)


def _frame(columns: Mapping[str, PlacedColumn], rows: int, values: bytes) -> pl.DataFrame:
    return pl.DataFrame([_series(name, column, rows, values) for name, column in columns.items()])


def _series(name: str, column: PlacedColumn, rows: int, values: bytes) -> pl.Series:
    kind = KINDS[column.kind]
    if column.distinct is not None:
        distinct = pl.Series(name, column.distinct, kind)
        if not column.width:
            return distinct.new_from_index(0, rows) if rows else distinct
        codes = np.frombuffer(values, _CODES[column.width], rows, column.at)
        if int(codes.max()) >= len(distinct):
            raise SegmentFault(f"{name} has a code without a value")
        return distinct[codes.astype(np.uint32)]
    numbers = np.frombuffer(values, _NUMBERS[column.kind], rows, column.at)
    if column.kind == "float" and not np.isfinite(numbers).all():
        raise SegmentFault(f"{name} has a number that JSON cannot have")
    if column.kind == "bool":
        numbers = _as_bool(name, numbers)
    series = pl.Series(name, numbers, kind)
    if column.nulls:
        nulls = _as_bool(name, np.frombuffer(values, np.uint8, rows, column.at + rows * column.width))
        return series.set(pl.Series(nulls), None)
    return series


def _as_bool(name: str, numbers: np.ndarray) -> np.ndarray:
    if len(numbers) and int(numbers.max()) > 1:
        raise SegmentFault(f"{name} has a byte that is neither 0 nor 1")
    return numbers.astype(bool)
