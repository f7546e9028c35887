"""Finds the rows of each device, such as a GPU or a network interface, in a frame of samples, and its values in these rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl

Device = tuple[Any, ...]  # the values of the columns that identify a device
LEAST_POLARS_ROWS = 2_000  # frames with fewer rows are searched by a loop of Python, because each call of polars takes long


class CounterValues(NamedTuple):
    """The values of a counter of one device, from the samples that have a value, in the order of their times."""

    wall_s: np.ndarray
    """The times in seconds since the epoch."""
    values: np.ndarray
    """integers."""
    boots: np.ndarray
    """Numbers that are equal if the boot is the same."""


class DeviceRows:
    """The rows of each device in a frame of samples, found once and used as arrays of numpy, because there may be millions."""

    def __init__(self, rows: pl.DataFrame, keys: Sequence[str]) -> None:
        """rows: a frame of samples, such as `Samples.gpus`. keys: the columns that identify a device."""
        self._rows = rows
        self._wall_s = rows["wall_s"].to_numpy()
        # Device -> the indexes of its rows, which are in the order of the times, as in the frame.
        self.rows_of_device: dict[Device, np.ndarray] = (
            _group_in_loop(rows, keys) if rows.height < LEAST_POLARS_ROWS else _group_with_polars(rows, keys)
        )

    @cached_property
    def _times(self) -> dict[Device, np.ndarray]:
        return {device: self._wall_s[row_indexes] for device, row_indexes in self.rows_of_device.items()}

    @cached_property
    def _boots(self) -> dict[Device, np.ndarray]:
        boot_runs = self._rows["boot_id"].rle().struct  # many rows one after the other have the same boot
        boot_numbers = np.repeat(_number_values(boot_runs.field("value").to_list()), boot_runs.field("len").to_numpy())
        return {device: boot_numbers[row_indexes] for device, row_indexes in self.rows_of_device.items()}

    def values(self, *columns: str | pl.Series) -> dict[Device, tuple[np.ndarray, ...]]:
        """For each device the times and the values of some columns, from the samples that have a value in all of them.

        columns: the name of a column, or a column with a value for each row of the frame.
        """
        has_values, value_columns = self._find_rows_with_values(columns)
        # a call of `fill_null` takes longer than all else for a short run
        arrays = [(column.fill_null(0) if column.null_count() else column).to_numpy() for column in value_columns]
        if has_values is None:
            return {
                device: (self._times[device], *(array[rows] for array in arrays))
                for device, rows in self.rows_of_device.items()
            }
        values_of_device = {}
        for device, rows in self.rows_of_device.items():
            rows_with_values = rows[has_values[rows]]
            values_of_device[device] = (self._wall_s[rows_with_values], *(array[rows_with_values] for array in arrays))
        return values_of_device

    def counters(self, column: str | pl.Series) -> dict[Device, CounterValues]:
        """The values of a counter of each device. column: as in `values`."""
        has_value, _ = self._find_rows_with_values([column])
        boots = self._boots
        if has_value is not None:
            boots = {device: boots[device][has_value[rows]] for device, rows in self.rows_of_device.items()}
        return {device: CounterValues(times, values, boots[device]) for device, (times, values) in self.values(column).items()}

    def _find_rows_with_values(self, columns: Sequence[str | pl.Series]) -> tuple[np.ndarray | None, list[pl.Series]]:
        """(whether a row of the frame has a value in all columns, the columns). None: all rows have."""
        value_columns = [self._rows[column] if isinstance(column, str) else column for column in columns]
        is_missing = [values.is_null().to_numpy() for values in value_columns if values.null_count()]
        return (~np.any(is_missing, axis=0) if is_missing else None), value_columns


def _group_with_polars(rows: pl.DataFrame, keys: Sequence[str]) -> dict[Device, np.ndarray]:
    if len(keys) == 2:  # the host and a UUID, which is usually on one host: searching for the UUID alone takes a third
        rows_of_uuid = {device[0]: indexes for device, indexes in _group_with_polars(rows, keys[1:]).items()}
        hosts = rows[keys[0]]
        # The rows are sorted by host, so all rows of a UUID are on one host if its first and its last row are.
        hosts_of_uuid = {uuid: {hosts[int(indexes[0])], hosts[int(indexes[-1])]} for uuid, indexes in rows_of_uuid.items()}
        if all(len(uuid_hosts) == 1 for uuid_hosts in hosts_of_uuid.values()):
            return {(hosts_of_uuid[uuid].pop(), uuid): indexes for uuid, indexes in rows_of_uuid.items()}
    grouped = rows.select(keys).with_row_index("row").group_by(keys, maintain_order=True).agg("row")
    return {device: indexes.to_numpy() for device, indexes in zip(grouped.select(keys).rows(), grouped["row"], strict=True)}


def _group_in_loop(rows: pl.DataFrame, keys: Sequence[str]) -> dict[Device, np.ndarray]:
    rows_of_device: dict[Device, list[int]] = {}
    for row, device in enumerate(zip(*(rows[key].to_list() for key in keys), strict=True)):
        rows_of_device.setdefault(device, []).append(row)
    return {device: np.array(row_indexes) for device, row_indexes in rows_of_device.items()}


def _number_values(values: Sequence[str]) -> np.ndarray:
    number_of_value: dict[str, int] = {}
    return np.array([number_of_value.setdefault(value, len(number_of_value)) for value in values])
