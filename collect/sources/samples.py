"""Turns telemetry samples into four frames: of hosts, of network interfaces, of GPUs and of RDMA ports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from collect.sources.interfaces import IDENTITY, with_one_name_each
from shardlab.record import Record, Sample

HOSTS = {
    "host": pl.String,
    "boot_id": pl.String,
    "t_s": pl.Float64,
    "wall_s": pl.Float64,
    "started_hz": pl.Float64,
    "cpu_pct": pl.Float64,
    "memory_used_bytes": pl.Int64,
    "memory_total_bytes": pl.Int64,
    "disk_read_bytes": pl.Int64,
    "disk_write_bytes": pl.Int64,
    "cpu_pressure_s": pl.Float64,
    "memory_pressure_s": pl.Float64,
    "io_pressure_s": pl.Float64,
    "nfs_read_bytes": pl.Int64,
    "nfs_write_bytes": pl.Int64,
}
NICS = {
    "host": pl.String,
    "boot_id": pl.String,
    "wall_s": pl.Float64,
    "name": pl.String,
    "kind": pl.String,
    "rx_bytes": pl.Int64,
    "tx_bytes": pl.Int64,
    "rx_errors": pl.Int64,
    "tx_errors": pl.Int64,
    "rx_dropped": pl.Int64,
    "tx_dropped": pl.Int64,
    "rx_discards": pl.Int64,
    "rx_pauses": pl.Int64,
    "tx_pauses": pl.Int64,
    "rx_priority_pauses": pl.Int64,
    "tx_priority_pauses": pl.Int64,
    "rdma_rx_bytes": pl.Int64,
    "rdma_tx_bytes": pl.Int64,
}
RDMA = {
    "host": pl.String,
    "boot_id": pl.String,
    "wall_s": pl.Float64,
    "device": pl.String,
    "port": pl.Int64,
    "link_layer": pl.String,
    "rx_bytes": pl.Int64,
    "tx_bytes": pl.Int64,
    "rx_errors": pl.Int64,
    "tx_discards": pl.Int64,
    "link_downed": pl.Int64,
}
GPUS = {
    "host": pl.String,
    "boot_id": pl.String,
    "wall_s": pl.Float64,
    "uuid": pl.String,
    "lost": pl.Boolean,
    "utilization_pct": pl.Float64,
    "memory_used_bytes": pl.Int64,
    "power_w": pl.Float64,
    "temperature_c": pl.Float64,
    "sm_clock_mhz": pl.Float64,
    "memory_clock_mhz": pl.Float64,
    "energy_j": pl.Float64,
    "pcie_rx_bytes": pl.Int64,
    "pcie_tx_bytes": pl.Int64,
    "nvlink_rx_bytes": pl.Int64,
    "nvlink_tx_bytes": pl.Int64,
    "ecc_uncorrected": pl.Int64,
    "processes": pl.Int64,
    "throttled": pl.List(pl.String),
    "xids": pl.List(pl.Int64),
}
_MOMENT = ("host", "boot_id", "wall_s")  # columns of a sample that are copied into the rows of its devices (NICs, GPUs, ports)
Interface = tuple[str, str, str]  # a network interface of a run: (host, kind, name)
Seen = tuple[float, int | None, str]  # the value of a counter in a sample: (wall_s, value, boot_id)


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
    inside = np.flatnonzero((wall_s >= window[0]) & (wall_s <= window[1]))
    if not len(inside):
        return rows.clear()
    among = rows.slice(inside[0], inside[-1] - inside[0] + 1)
    return among if among.height == len(inside) else rows[inside]  # with several hosts, these rows are not contiguous


def measured(gpus: pl.DataFrame) -> pl.DataFrame:
    """The samples of real GPUs, without the samples of GPUs that a stub of NVML played."""
    # A filter would copy the frame, which may be large.
    return gpus.filter(~pl.col("played")) if gpus["played"].any() else gpus


def of_interfaces(nics: pl.DataFrame, counter: str) -> dict[Interface, list[Seen]]:
    """The values of a counter, such as `tx_bytes`, of each network interface of each host, in the order of the samples."""
    columns = [nics[name].to_list() for name in ("host", "kind", "name", "wall_s", counter, "boot_id")]
    seen_of: dict[Interface, list[Seen]] = {}
    for interface, seen in zip(zip(*columns[:3], strict=True), zip(*columns[3:], strict=True), strict=True):
        seen_of.setdefault(interface, []).append(seen)
    return seen_of


def frames(hosts: Mapping[str, Sequence[Sample]], parts: Sequence[Samples] = ()) -> Samples:
    """The frames of the samples of one run. hosts: {host: its samples}. parts: more samples of the run, which are already in
    frames."""
    return Samples(*(rows.drop("run") for rows in of_runs([hosts], [parts])))


def of_runs(runs: Sequence[Mapping[str, Sequence[Sample]]], parts: Sequence[Sequence[Samples]] = ()) -> Samples:
    """The samples of many runs in one set of frames, because making a frame takes about as long for one run as for a hundred.

    The frames have a column `run`: the index of the run in `runs`. parts: for each run, its samples that are already in frames.
    """
    every = [part(runs)]
    for index, of_run in enumerate(parts):
        run = pl.lit(index, every[0].hosts.schema["run"]).alias("run")
        every += [Samples(*(rows.with_columns(run) for rows in of_part)) for of_part in of_run]
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
    hosts = _frame(HOSTS, samples).insert_column(0, pl.Series("run", _repeated(counts)))
    nics = _devices(hosts, NICS | IDENTITY, [sample.nics or () for sample in samples])
    return Samples(hosts, nics, _gpus(hosts, samples), _devices(hosts, RDMA, [sample.rdma or () for sample in samples]))


def _gpus(hosts: pl.DataFrame, samples: Sequence[Sample]) -> pl.DataFrame:
    """The frame with one row for each GPU in each sample.

    Two columns are filled sample by sample and not GPU by GPU, because a large run has millions of rows. `played` is the same
    for all GPUs of a sample. `memory_total_bytes` is recorded only in the first sample that a sampler writes.
    """
    of_samples = [sample.gpus or () for sample in samples]
    of_host = pl.Series("played", [any(gpu.played for gpu in gpus[:1]) for gpus in of_samples], pl.Boolean)
    played = pl.DataFrame([of_host])[_repeated(list(map(len, of_samples)))]["played"]
    sizes: list[int | None] = []
    for sample, gpus in zip(samples, of_samples, strict=True):
        sizes += [gpu.memory_total_bytes for gpu in gpus] if sample.started_hz is not None else [None] * len(gpus)
    more = [played, pl.Series("memory_total_bytes", sizes, pl.Int64)]
    return _devices(hosts, GPUS, of_samples).hstack(more)


def _joined(parts: Sequence[Samples]) -> Samples:
    """Join several parts into one set of frames, sorted by run, host and wall_s."""
    if len(parts) == 1:
        return parts[0]
    filled = sorted((each for each in parts if each.hosts.height), key=lambda each: each.hosts.row(0)[:2])
    if not filled:
        return parts[0]
    joined = Samples(*(pl.concat(rows) for rows in zip(*filled, strict=True)))
    edges = [(each.hosts.row(0)[:2], each.hosts.row(-1)[:2]) for each in filled]  # (run, host) of the first and the last row
    if all(last < first for (_, last), (first, _) in itertools.pairwise(edges)):
        return joined
    return Samples(*(rows.sort("run", "host", "wall_s", maintain_order=True) for rows in joined))


def _devices(hosts: pl.DataFrame, schema: Mapping[str, Any], devices: Sequence[Sequence[Record]]) -> pl.DataFrame:
    """A frame with one row for each device in each sample.

    hosts: the frame with one row for each sample. schema: the columns of the new frame; columns that are in _MOMENT are copied
    from `hosts`. devices: for each row of `hosts`, the records of the devices in this sample.
    """
    beside = hosts.select("run", *(name for name in _MOMENT if name in schema))[_repeated(list(map(len, devices)))]
    own = {name: of for name, of in schema.items() if name not in _MOMENT}
    return beside.hstack(_frame(own, [device for of_sample in devices for device in of_sample]))


def _repeated(counts: Sequence[int]) -> np.ndarray:
    """For each index, repeat the index as often as the count at this index says: [2, 1] gives [0, 0, 1]."""
    return np.repeat(np.arange(len(counts)), np.array(counts, int))


def _frame(schema: Mapping[str, Any], records: Sequence[Record]) -> pl.DataFrame:
    """A frame with a row for each record and a column for each field that the schema names."""
    columns = zip(*map(attrgetter(*schema), records)) if records else ((),) * len(schema)
    return pl.DataFrame([_series(name, values, schema[name]) for name, values in zip(schema, columns, strict=True)])


def _series(name: str, values: Sequence[Any], kind: Any) -> pl.Series:
    """Make a column of a frame. If its values are lists, each distinct list is converted only once, because converting is
    slow."""
    if not isinstance(kind, pl.List):
        return pl.Series(name, values, kind)
    if not any(values) and len(values) and None not in values:  # the usual case: all lists are empty
        return pl.Series(name, [[]], kind).new_from_index(0, len(values))
    places: dict[tuple[Any, ...] | None, int] = {}
    rows = [places.setdefault(None if value is None else tuple(value), len(places)) for value in values]
    return pl.Series(name, [None if value is None else list(value) for value in places], kind)[np.array(rows, np.uint32)]
