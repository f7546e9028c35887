"""Finds the rows of each device, such as a GPU or a network interface, in a frame of samples, and its values in these rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl

Device = tuple[Any, ...]  # the values of the columns that identify a device


MANY = 2_000  # frames with fewer rows are searched by a loop of Python, because each call of polars takes as long as many rows


class Counter(NamedTuple):
    """The values of a counter of one device, from the samples that have a value, in the order of their times.

    wall_s: the times in seconds since the epoch. values: integers. boots: numbers that are equal if the boot is the same.
    """

    wall_s: np.ndarray
    values: np.ndarray
    boots: np.ndarray


class DeviceRows:
    """The rows of each device in a frame of samples.

    A large run has millions of rows, so the rows of the devices are found once, and metrics use arrays of numpy.
    """

    def __init__(self, rows: pl.DataFrame, keys: Sequence[str]) -> None:
        """rows: a frame of samples, such as `Samples.gpus`. keys: the columns that identify a device."""
        self._rows = rows
        self._wall_s = rows["wall_s"].to_numpy()
        # Device -> the indexes of its rows, which are in the order of the times, as in the frame.
        self.of: dict[Device, np.ndarray] = _small(rows, keys) if rows.height < MANY else _large(rows, keys)

    @cached_property
    def _times(self) -> dict[Device, np.ndarray]:
        return {device: self._wall_s[places] for device, places in self.of.items()}

    @cached_property
    def _boots(self) -> dict[Device, np.ndarray]:
        same = self._rows["boot_id"].rle().struct  # many rows one after the other have the same boot
        numbers = np.repeat(_numbered(same.field("value").to_list()), same.field("len").to_numpy())
        return {device: numbers[places] for device, places in self.of.items()}

    def values(self, *columns: str | pl.Series) -> dict[Device, tuple[np.ndarray, ...]]:
        """For each device the times and the values of some columns, from the samples that have a value in all of them.

        columns: the name of a column, or a column with a value for each row of the frame.
        """
        kept, series = self._kept(columns)
        # a call of `fill_null` takes longer than all else for a short run
        arrays = [(each.fill_null(0) if each.null_count() else each).to_numpy() for each in series]
        if kept is None:
            return {device: (self._times[device], *(one[rows] for one in arrays)) for device, rows in self.of.items()}
        found = {}
        for device, rows in self.of.items():
            rows_kept = rows[kept[rows]]
            found[device] = (self._wall_s[rows_kept], *(one[rows_kept] for one in arrays))
        return found

    def counters(self, column: str | pl.Series) -> dict[Device, Counter]:
        """The values of a counter of each device. column: as in `values`."""
        kept, _ = self._kept([column])
        boots = self._boots
        if kept is not None:
            boots = {device: boots[device][kept[rows]] for device, rows in self.of.items()}
        return {device: Counter(times, values, boots[device]) for device, (times, values) in self.values(column).items()}

    def _kept(self, columns: Sequence[str | pl.Series]) -> tuple[np.ndarray | None, list[pl.Series]]:
        """(whether a row of the frame has a value in all columns, the columns). None: all rows have."""
        series = [self._rows[column] if isinstance(column, str) else column for column in columns]
        absent = [each.is_null().to_numpy() for each in series if each.null_count()]
        return (~np.any(absent, axis=0) if absent else None), series


def _large(rows: pl.DataFrame, keys: Sequence[str]) -> dict[Device, np.ndarray]:
    if len(keys) == 2:  # the host and a UUID, which is usually on one host: searching for the UUID alone takes a third
        found = {device[0]: places for device, places in _large(rows, keys[1:]).items()}
        hosts = rows[keys[0]]
        # The rows are sorted by host, so all rows of a UUID are on one host if its first and its last row are.
        on = {uuid: {hosts[int(places[0])], hosts[int(places[-1])]} for uuid, places in found.items()}
        if all(len(of_uuid) == 1 for of_uuid in on.values()):
            return {(on[uuid].pop(), uuid): places for uuid, places in found.items()}
    grouped = rows.select(keys).with_row_index("row").group_by(keys, maintain_order=True).agg("row")
    return {device: places.to_numpy() for device, places in zip(grouped.select(keys).rows(), grouped["row"], strict=True)}


def _small(rows: pl.DataFrame, keys: Sequence[str]) -> dict[Device, np.ndarray]:
    places: dict[Device, list[int]] = {}
    for row, device in enumerate(zip(*(rows[key].to_list() for key in keys), strict=True)):
        places.setdefault(device, []).append(row)
    return {device: np.array(of_device) for device, of_device in places.items()}


def _numbered(values: Sequence[str]) -> np.ndarray:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])
