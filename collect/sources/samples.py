"""Telemetry samples -> three frames, one per thing that was sampled: hosts, network interfaces, GPUs."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

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


class Samples(NamedTuple):
    """hosts: one row per host and moment; nics and gpus: one per host, moment and device. Ordered by host and wall_s."""

    hosts: pl.DataFrame
    nics: pl.DataFrame
    gpus: pl.DataFrame

    def within(self, window: tuple[float, float]) -> Samples:
        """The samples between two moments in seconds since the epoch, both included."""
        return Samples(*(rows.filter(pl.col("wall_s").is_between(*window)) for rows in self))


def frames(hosts: dict[str, list[Sample]]) -> Samples:
    """The samples of all hosts of a run."""
    samples = [sample for records in hosts.values() for sample in records]
    samples.sort(key=lambda sample: (sample.host, sample.wall_s))
    nics = [(sample, nic) for sample in samples for nic in sample.nics or ()]
    gpus = [(sample, gpu) for sample in samples for gpu in sample.gpus or ()]
    return Samples(
        pl.DataFrame({name: [getattr(sample, name) for sample in samples] for name in HOSTS}, schema=HOSTS),
        pl.DataFrame({name: [_either(pair, name) for pair in nics] for name in NICS}, schema=NICS),
        pl.DataFrame({name: [_either(pair, name) for pair in gpus] for name in GPUS}, schema=GPUS),
    )


def _either(pair: tuple[Sample, object], name: str) -> object:
    """A field of the device, else of the sample that it stands in."""
    sample, device = pair
    return getattr(device, name) if hasattr(device, name) else getattr(sample, name)
