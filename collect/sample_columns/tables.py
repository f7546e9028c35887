"""The tables and columns into which samples of telemetry are taken apart. Files of columns and frames have these columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from shardlab.runs.record import Sample

# `texts` and `ints` are lists. A column of texts or lists is stored as its distinct values and a code for each row.
Kind = Literal["text", "float", "int", "bool", "texts", "ints"]
LISTED: frozenset[Kind] = frozenset({"text", "texts", "ints"})  # the kinds that are stored as distinct values and codes

HOSTS: Mapping[str, Kind] = {
    "host": "text",
    "boot_id": "text",
    "t_s": "float",
    "wall_s": "float",
    "started_hz": "float",
    "cpu_pct": "float",
    "busiest_core_pct": "float",
    "memory_used_bytes": "int",
    "memory_total_bytes": "int",
    "disk_read_bytes": "int",
    "disk_write_bytes": "int",
    "cpu_pressure_s": "float",
    "memory_pressure_s": "float",
    "io_pressure_s": "float",
    "nfs_read_bytes": "int",
    "nfs_write_bytes": "int",
}
NICS: Mapping[str, Kind] = {
    "name": "text",
    "kind": "text",
    "rx_bytes": "int",
    "tx_bytes": "int",
    "rx_errors": "int",
    "tx_errors": "int",
    "rx_dropped": "int",
    "tx_dropped": "int",
    "rx_discards": "int",
    "rx_pauses": "int",
    "tx_pauses": "int",
    "rx_priority_pauses": "int",
    "tx_priority_pauses": "int",
    "rdma_rx_bytes": "int",
    "rdma_tx_bytes": "int",
    "mac": "text",
    "pci": "text",
}
RDMA: Mapping[str, Kind] = {
    "device": "text",
    "port": "int",
    "link_layer": "text",
    "rx_bytes": "int",
    "tx_bytes": "int",
    "rx_errors": "int",
    "tx_discards": "int",
    "link_downed": "int",
}
GPUS: Mapping[str, Kind] = {
    "uuid": "text",
    "lost": "bool",
    "utilization_pct": "float",
    "memory_used_bytes": "int",
    "power_w": "float",
    "temperature_c": "float",
    "sm_clock_mhz": "float",
    "memory_clock_mhz": "float",
    "energy_j": "float",
    "pcie_rx_bytes": "int",
    "pcie_tx_bytes": "int",
    "nvlink_rx_bytes": "int",
    "nvlink_tx_bytes": "int",
    "ecc_uncorrected": "int",
    "processes": "int",
    "throttled": "texts",
    "xids": "ints",
}
# Columns of GPUs that are filled sample by sample and not GPU by GPU (`gpu_sample_columns`), because a large run has millions
# of rows.
OF_SAMPLES: Mapping[str, Kind] = {"played": "bool", "memory_total_bytes": "int"}
# The columns that have a value in each row. In other columns, a value that was not measured is null.
ALWAYS = frozenset({"host", "boot_id", "t_s", "wall_s", "name", "kind", "uuid", "lost", "played", "device", "port"})


def gpu_sample_columns(samples: Sequence[Sample]) -> tuple[list[bool], list[int | None]]:
    """The two columns OF_SAMPLES for the GPUs of all samples: (played, memory_total_bytes).

    All GPUs of a sample are played if the first GPU is. The size of the memory is recorded only in the first sample that a
    sampler writes.
    """
    played: list[bool] = []
    sizes: list[int | None] = []
    for sample in samples:
        if gpus := sample.gpus:
            played += [gpus[0].played] * len(gpus)
            sizes += [None] * len(gpus) if sample.started_hz is None else [gpu.memory_total_bytes for gpu in gpus]
    return played, sizes
