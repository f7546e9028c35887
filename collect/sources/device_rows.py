"""Finds the rows of each device, such as a GPU or a network interface, in a frame of samples, and its values in these rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl

DeviceKey = tuple[Any, ...]  # the values of the columns that identify a device
LEAST_POLARS_ROWS = 2_000  # frames with fewer rows are searched by a loop of Python, because each call of polars takes long


class CounterValues(NamedTuple):
    """The values of a counter of one device, from the samples that have a value, in the order of their times."""

    wall_s: np.ndarray
    """The times in seconds since the epoch."""
    values: np.ndarray
    """integers."""
    boot_numbers: np.ndarray
    """Numbers that are equal if the boot is the same."""


class DeviceRows:
    """The rows of each device in a frame of samples, found once and used as arrays of numpy, because there may be millions."""

    def __init__(self, rows: pl.DataFrame, key_columns: Sequence[str]) -> None:
        """rows: a frame of samples, such as `Samples.gpus`. key_columns: the columns that identify a device."""
        self._sample_rows = rows
        self._wall_s = rows["wall_s"].to_numpy()
        # DeviceKey -> the indexes of its rows, which are in the order of the times, as in the frame.
        self.rows_by_device: dict[DeviceKey, np.ndarray] = (
            _group_in_loop(rows, key_columns) if rows.height < LEAST_POLARS_ROWS else _group_with_polars(rows, key_columns)
        )

    @cached_property
    def _times_by_device(self) -> dict[DeviceKey, np.ndarray]:
        return {device: self._wall_s[row_indexes] for device, row_indexes in self.rows_by_device.items()}

    @cached_property
    def _boots_by_device(self) -> dict[DeviceKey, np.ndarray]:
        boot_runs = self._sample_rows["boot_id"].rle().struct  # many rows one after the other have the same boot
        boot_numbers = np.repeat(_number_values(boot_runs.field("value").to_list()), boot_runs.field("len").to_numpy())
        return {device: boot_numbers[row_indexes] for device, row_indexes in self.rows_by_device.items()}

    def get_values(self, *requested_columns: str | pl.Series) -> dict[DeviceKey, tuple[np.ndarray, ...]]:
        """For each device the times and the values of some columns, from the samples that have a value in all of them.

        requested_columns: the name of a column, or a column with a value for each row of the frame.
        """
        is_complete, value_columns = self._find_rows_with_values(requested_columns)
        # a call of `fill_null` takes longer than all else for a short run
        column_arrays = [(column.fill_null(0) if column.null_count() else column).to_numpy() for column in value_columns]
        if is_complete is None:
            return {
                device: (self._times_by_device[device], *(array[row_indexes] for array in column_arrays))
                for device, row_indexes in self.rows_by_device.items()
            }
        values_by_device = {}
        for device, row_indexes in self.rows_by_device.items():
            rows_with_values = row_indexes[is_complete[row_indexes]]
            values_by_device[device] = (self._wall_s[rows_with_values], *(array[rows_with_values] for array in column_arrays))
        return values_by_device

    def get_counters(self, column: str | pl.Series) -> dict[DeviceKey, CounterValues]:
        """The values of a counter of each device. column: as in `get_values`."""
        is_complete, _ = self._find_rows_with_values([column])
        boots = self._boots_by_device
        if is_complete is not None:
            boots = {device: boots[device][is_complete[row_indexes]] for device, row_indexes in self.rows_by_device.items()}
        return {
            device: CounterValues(times, values, boots[device]) for device, (times, values) in self.get_values(column).items()
        }

    def _find_rows_with_values(self, requested_columns: Sequence[str | pl.Series]) -> tuple[np.ndarray | None, list[pl.Series]]:
        """(whether a row of the frame has a value in all columns, the columns). None: all rows have."""
        value_columns = [self._sample_rows[column] if isinstance(column, str) else column for column in requested_columns]
        is_missing = [column_values.is_null().to_numpy() for column_values in value_columns if column_values.null_count()]
        return (~np.any(is_missing, axis=0) if is_missing else None), value_columns


def _group_with_polars(sample_rows: pl.DataFrame, keys: Sequence[str]) -> dict[DeviceKey, np.ndarray]:
    if len(keys) == 2:  # the host and a UUID, which is usually on one host: searching for the UUID alone takes a third
        rows_by_uuid = {device[0]: indexes for device, indexes in _group_with_polars(sample_rows, keys[1:]).items()}
        hosts = sample_rows[keys[0]]
        # The rows are sorted by host, so all rows of a UUID are on one host if its first and its last row are.
        hosts_by_uuid = {uuid: {hosts[int(indexes[0])], hosts[int(indexes[-1])]} for uuid, indexes in rows_by_uuid.items()}
        if all(len(uuid_hosts) == 1 for uuid_hosts in hosts_by_uuid.values()):
            return {(hosts_by_uuid[uuid].pop(), uuid): indexes for uuid, indexes in rows_by_uuid.items()}
    grouped = sample_rows.select(keys).with_row_index("row").group_by(keys, maintain_order=True).agg("row")
    return {device: indexes.to_numpy() for device, indexes in zip(grouped.select(keys).rows(), grouped["row"], strict=True)}


def _group_in_loop(sample_rows: pl.DataFrame, key_columns: Sequence[str]) -> dict[DeviceKey, np.ndarray]:
    rows_by_device: dict[DeviceKey, list[int]] = {}
    for row_index, device in enumerate(zip(*(sample_rows[key_column].to_list() for key_column in key_columns), strict=True)):
        rows_by_device.setdefault(device, []).append(row_index)
    return {device: np.array(row_indexes) for device, row_indexes in rows_by_device.items()}


def _number_values(repeated_values: Sequence[str]) -> np.ndarray:
    number_by_value: dict[str, int] = {}
    return np.array([number_by_value.setdefault(repeated_value, len(number_by_value)) for repeated_value in repeated_values])
