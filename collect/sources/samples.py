"""Telemetry samples -> three frames, one per thing that was sampled: hosts, network interfaces, GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from collect.sources.steps import by_run
from shardlab.record import Sample

HOSTS = {
    "host": pl.String,
    "boot_id": pl.String,
    "t_s": pl.Float64,
    "wall_s": pl.Float64,
    "cpu_pct": pl.Float64,
    "memory_used_bytes": pl.Int64,
    "memory_total_bytes": pl.Int64,
    "disk_read_bytes": pl.Int64,
    "disk_write_bytes": pl.Int64,
}
NICS = {
    "host": pl.String,
    "boot_id": pl.String,
    "wall_s": pl.Float64,
    "name": pl.String,
    "kind": pl.String,
    "rx_bytes": pl.Int64,
    "tx_bytes": pl.Int64,
}
GPUS = {
    "host": pl.String,
    "wall_s": pl.Float64,
    "uuid": pl.String,
    "utilization_pct": pl.Float64,
    "memory_used_bytes": pl.Int64,
    "power_w": pl.Float64,
    "temperature_c": pl.Float64,
    "sm_clock_mhz": pl.Float64,
}


_of_host = attrgetter(*HOSTS)
_of_nic = attrgetter("name", "kind", "rx_bytes", "tx_bytes")
_of_gpu = attrgetter("uuid", "utilization_pct", "memory_used_bytes", "power_w", "temperature_c", "sm_clock_mhz")


class Samples(NamedTuple):
    """hosts: one row per host and moment; nics and gpus: one per host, moment and device. Ordered by host and wall_s."""

    hosts: pl.DataFrame
    nics: pl.DataFrame
    gpus: pl.DataFrame

    def within(self, window: tuple[float, float]) -> Samples:
        """The samples between two moments in seconds since the epoch, both included."""
        return Samples(*(_within(rows, *window) for rows in self))


def _within(rows: pl.DataFrame, first: float, last: float) -> pl.DataFrame:
    wall_s = rows["wall_s"].to_numpy()
    inside = np.flatnonzero((wall_s >= first) & (wall_s <= last))
    if not len(inside):
        return rows.clear()
    among = rows.slice(inside[0], inside[-1] - inside[0] + 1)
    return among if among.height == len(inside) else rows[inside]  # of several hosts they are no one stretch


def frames(hosts: Mapping[str, Sequence[Sample]]) -> Samples:
    """The samples of all hosts of a run."""
    return of_runs([hosts])[0]


def of_runs(runs: Sequence[Mapping[str, Sequence[Sample]]]) -> list[Samples]:
    """Those of many runs at once, as a frame costs about the same for one run as for a hundred."""
    hosts_: list[tuple[Any, ...]] = []
    nics: list[tuple[Any, ...]] = []
    gpus: list[tuple[Any, ...]] = []
    for number, hosts in enumerate(runs):
        samples = [sample for records in hosts.values() for sample in records]
        samples.sort(key=lambda sample: (sample.host, sample.wall_s))
        for one in samples:
            hosts_.append((number, *_of_host(one)))
            nics += [(number, one.host, one.boot_id, one.wall_s, *_of_nic(nic)) for nic in one.nics or ()]
            gpus += [(number, one.host, one.wall_s, *_of_gpu(gpu)) for gpu in one.gpus or ()]
    common = (_frame(HOSTS, hosts_), _frame(NICS, nics), _frame(GPUS, gpus))
    return list(map(Samples, *(by_run(frame, len(runs)) for frame in common)))


def _frame(schema: Mapping[str, Any], rows: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    """A row each, with the number of its run before the columns."""
    columns = zip(*rows) if rows else ((),) * (len(schema) + 1)
    whole = {"run": pl.Int64, **schema}
    return pl.DataFrame([pl.Series(name, values, whole[name]) for name, values in zip(whole, columns, strict=True)])
