"""Turns telemetry samples into four frames: of hosts, of network interfaces, of GPUs and of RDMA ports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from collect.sample_columns import tables
from collect.sample_columns.tables import Kind
from collect.sources.interfaces import with_one_name_each
from shardlab.runs.record import Record, Sample

KINDS: Mapping[Kind, Any] = {
    "text": pl.String,
    "float": pl.Float64,
    "int": pl.Int64,
    "bool": pl.Boolean,
    "texts": pl.List(pl.String),
    "ints": pl.List(pl.Int64),
}
_MOMENT = ("host", "boot_id", "wall_s")  # columns of a sample that are copied into the rows of its devices (NICs, GPUs, ports)
INTERFACE = ("host", "kind", "name")  # the columns that identify a network interface of a run


class Samples(NamedTuple):
    """The telemetry of one or more runs as frames, sorted by host and wall_s.

    hosts: one row per sample of a host. nics, gpus, rdma: one row per sample and device.
    In all rows of a run and a host, a network interface has one name, and this name is unique
    (`interfaces.with_one_name_each`).
    """

    hosts: pl.DataFrame
    nics: pl.DataFrame
    gpus: pl.DataFrame
    rdma: pl.DataFrame


def within(rows: pl.DataFrame, window: tuple[float, float]) -> pl.DataFrame:
    """The samples between two moments. window: (first moment, last moment), both included, in seconds since the epoch."""
    wall_s = rows["wall_s"].to_numpy()
    is_inside = (wall_s >= window[0]) & (wall_s <= window[1])
    inside = np.flatnonzero(is_inside)
    if not len(inside):
        return rows.clear()
    among = rows.slice(inside[0], inside[-1] - inside[0] + 1)  # a slice copies nothing
    return among if among.height == len(inside) else rows.filter(is_inside)  # with several hosts, the rows are not contiguous


def measured(gpus: pl.DataFrame) -> pl.DataFrame:
    """The samples of real GPUs, without the samples of GPUs that a stub of NVML played."""
    # A filter would copy the frame, which may be large.
    return gpus.filter(~pl.col("played")) if gpus["played"].any() else gpus


def frames(hosts: Mapping[str, Sequence[Sample]], parts: Sequence[Samples] = ()) -> Samples:
    """The frames of the samples of one run. hosts: {host: its samples}. parts: more samples of the run, which are already in
    frames."""
    return Samples(*(rows.drop("run") for rows in of_runs([hosts], [parts])))


def of_runs(runs: Sequence[Mapping[str, Sequence[Sample]]], parts: Sequence[Sequence[Samples]] = ()) -> Samples:
    """The samples of many runs in one set of frames, because making a frame takes about as long for one run as for a hundred.

    The frames have a column `run`: the index of the run in `runs`. parts: for each run, its samples that are already in frames.
    """
    every = []
    for index, of_run in enumerate(parts):
        run = pl.lit(index, pl.Int64).alias("run")
        every += [Samples(*(rows.with_columns(run) for rows in of_part)) for of_part in of_run]
    every.append(part(runs))  # last, because these samples were read after those in the parts of their run
    hosts, nics, gpus, rdma = _joined(every)
    return Samples(hosts, with_one_name_each(nics), gpus, rdma)


def part(runs: Sequence[Mapping[str, Sequence[Sample]]]) -> Samples:
    """The frames of some samples of many runs. `of_runs` joins the results of several calls of `part`.

    Network interfaces still have the names that they have in the samples, and `nics` also has the columns IDENTITY.
    """
    samples: list[Sample] = []
    counts = []
    for run in runs:
        of_run = [sample for records in run.values() for sample in records]
        samples += sorted(of_run, key=lambda sample: (sample.host, sample.wall_s))
        counts.append(len(of_run))
    hosts = _frame(tables.HOSTS, samples).insert_column(0, pl.Series("run", _repeated(counts)))
    played, sizes = tables.of_samples(samples)
    more = [_series("played", played, pl.Boolean), _series("memory_total_bytes", sizes, pl.Int64)]
    nics, gpus, rdma = (
        (list(map(len, of_kind)), _frame(columns, [device for of_sample in of_kind for device in of_sample]))
        for columns, of_kind in (
            (tables.NICS, [sample.nics or () for sample in samples]),
            (tables.GPUS, [sample.gpus or () for sample in samples]),
            (tables.RDMA, [sample.rdma or () for sample in samples]),
        )
    )
    return of_tables(hosts, nics, (gpus[0], gpus[1].hstack(more)), rdma)


def of_tables(hosts: pl.DataFrame, *devices: tuple[Sequence[int] | np.ndarray, pl.DataFrame]) -> Samples:
    """The frames of samples from four tables.

    hosts: the samples of hosts. devices: for NICs, GPUs and RDMA ports: (the number of devices of each sample, the rows of the
    devices). The rows of a device get the columns of its sample that say when and where it was taken.
    """
    moments = hosts.select("run", *_MOMENT)
    return Samples(hosts, *(moments[_repeated(counts)].hstack(rows) for counts, rows in devices))


def _joined(parts: Sequence[Samples]) -> Samples:
    """Join several parts into one set of frames, sorted by run, host and wall_s. Samples that are equal in these keep their
    order."""
    filled = [each for each in parts if each.hosts.height]
    if len(filled) < 2:
        return filled[0] if filled else parts[-1]
    edges = [((_place(each.hosts, 0), number), (_place(each.hosts, -1), number)) for number, each in enumerate(filled)]
    by_start = sorted(range(len(filled)), key=lambda number: edges[number][0])
    if all(edges[before][1] < edges[after][0] for before, after in itertools.pairwise(by_start)):
        return _concatenated([filled[number] for number in by_start])
    return in_order(_concatenated(filled))


def in_order(samples: Samples) -> Samples:
    """Sort frames by run, host and wall_s. Samples that are equal in these keep their order."""
    return Samples(*(rows.sort("run", "host", "wall_s", maintain_order=True) for rows in samples))


def _concatenated(parts: Sequence[Samples]) -> Samples:
    return Samples(*(pl.concat(rows) for rows in zip(*parts, strict=True)))


def _place(hosts: pl.DataFrame, row: int) -> tuple[Any, ...]:
    """The values by which frames are sorted, in one row of `hosts`."""
    return hosts.select("run", "host", "wall_s").row(row)


def _repeated(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """For each index, repeat the index as often as the count at this index says: [2, 1] gives [0, 0, 1]."""
    return np.repeat(np.arange(len(counts)), np.array(counts, int))


def _frame(columns: Mapping[str, Kind], records: Sequence[Record]) -> pl.DataFrame:
    """A frame with a row for each record and a column for each field in `columns`."""
    values = zip(*map(attrgetter(*columns), records)) if records else ((),) * len(columns)
    return pl.DataFrame([_series(name, of_name, KINDS[columns[name]]) for name, of_name in zip(columns, values, strict=True)])


def _series(name: str, values: Sequence[Any], kind: Any) -> pl.Series:
    """Make a column of a frame. If its values are lists, each distinct list is converted only once, because converting is
    slow."""
    if not isinstance(kind, pl.List):
        return pl.Series(name, values, kind)
    if not any(values) and len(values) and None not in values:  # the usual case: all lists are empty
        return pl.Series(name, [[]], kind)[np.zeros(len(values), np.uint32)]
    places: dict[tuple[Any, ...] | None, int] = {}
    rows = [places.setdefault(None if value is None else tuple(value), len(places)) for value in values]
    distinct = [None if value is None else list(value) for value in places]
    return pl.Series(name, distinct, kind, strict=False)[np.array(rows, np.uint32)]
