"""Turns telemetry samples into four frames: of hosts, of network interfaces, of GPUs and of RDMA ports.

The kernel may rename a network interface, and give its old name to another one: `unify_interface_names` finds
the samples of the same interface.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from shardlab.runs.record import Record, Sample

IDENTITY_COLUMN_TYPES = {"mac": pl.String, "pci": pl.String}  # the columns that identify an interface in addition to its name
_IDENTITY_KEYS = ("run", "host", "kind", "name", *IDENTITY_COLUMN_TYPES)

# The tables and columns into which samples are taken apart.
HOST_COLUMNS: Mapping[str, Any] = {
    **dict.fromkeys(("host", "boot_id"), pl.String),
    **dict.fromkeys(("t_s", "wall_s", "started_hz", "cpu_pct", "busiest_core_pct"), pl.Float64),
    **dict.fromkeys(("memory_used_bytes", "memory_total_bytes", "disk_read_bytes", "disk_write_bytes"), pl.Int64),
    **dict.fromkeys(("cpu_pressure_s", "memory_pressure_s", "io_pressure_s"), pl.Float64),
    **dict.fromkeys(("nfs_read_bytes", "nfs_write_bytes"), pl.Int64),
}
NIC_COLUMNS: Mapping[str, Any] = {
    **dict.fromkeys(("name", "kind"), pl.String),
    **dict.fromkeys(("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_discards"), pl.Int64),
    **dict.fromkeys(("rx_pauses", "tx_pauses", "rx_priority_pauses", "tx_priority_pauses"), pl.Int64),
    **dict.fromkeys(("rdma_rx_bytes", "rdma_tx_bytes", "rx_bandwidth_limited", "tx_bandwidth_limited"), pl.Int64),
    **dict.fromkeys(("packet_rate_limited", "connections_limited"), pl.Int64),
    **IDENTITY_COLUMN_TYPES,
}
GPU_COLUMNS: Mapping[str, Any] = {
    "uuid": pl.String,
    "lost": pl.Boolean,
    "utilization_pct": pl.Float64,
    "memory_used_bytes": pl.Int64,
    **dict.fromkeys(("power_w", "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "energy_j"), pl.Float64),
    **dict.fromkeys(("pcie_rx_bytes", "pcie_tx_bytes", "nvlink_rx_bytes", "nvlink_tx_bytes"), pl.Int64),
    **dict.fromkeys(("ecc_uncorrected", "processes"), pl.Int64),
    "throttled": pl.List(pl.String),
    "xids": pl.List(pl.Int64),
}
RDMA_COLUMNS: Mapping[str, Any] = {
    "device": pl.String,
    "port": pl.Int64,
    "link_layer": pl.String,
    **dict.fromkeys(("rx_bytes", "tx_bytes", "rx_errors", "tx_discards", "link_downed", "rx_drops"), pl.Int64),
    "retransmitted_packets": pl.Int64,
}
# Columns of GPUs that are filled sample by sample and not GPU by GPU, because a large run has millions of rows.
GPU_SAMPLE_COLUMNS: Mapping[str, Any] = {"played": pl.Boolean, "memory_total_bytes": pl.Int64}
# Columns of a sample that are copied into the rows of its devices (NICs, GPUs, ports).
COPIED_COLUMNS = ("host", "boot_id", "wall_s")
_DEVICE_COLUMNS = {"run": pl.Int64, **{name: HOST_COLUMNS[name] for name in COPIED_COLUMNS}}  # run: the index of a run
# The columns of the four frames of samples (`build_sample_part`): of hosts, NICs, GPUs and RDMA ports.
FRAME_SCHEMAS = [
    pl.Schema(columns)
    for columns in (
        {"run": pl.Int64, **HOST_COLUMNS},
        {**_DEVICE_COLUMNS, **NIC_COLUMNS},
        {**_DEVICE_COLUMNS, **GPU_COLUMNS, **GPU_SAMPLE_COLUMNS},
        {**_DEVICE_COLUMNS, **RDMA_COLUMNS},
    )
]
INTERFACE_KEYS = ("host", "kind", "name")  # the columns that identify a network interface of a run


class Samples(NamedTuple):
    """The telemetry of one or more runs as frames, sorted by host and wall_s."""

    hosts: pl.DataFrame
    """One row per sample of a host."""
    nics: pl.DataFrame
    """One row per sample and network interface. In all rows of a run and a host, an interface has one name, and this name is
    unique (`interfaces.unify_interface_names`)."""
    gpus: pl.DataFrame
    """One row per sample and GPU."""
    rdma: pl.DataFrame
    """One row per sample and RDMA port, named as in `nics`."""


def select_in_window(sample_rows: pl.DataFrame, window: tuple[float, float]) -> pl.DataFrame:
    """The samples between two moments. window: (first moment, last moment), both included, in seconds since the epoch."""
    wall_s = sample_rows["wall_s"].to_numpy()
    is_inside = (wall_s >= window[0]) & (wall_s <= window[1])
    inside_indexes = np.flatnonzero(is_inside)
    if not len(inside_indexes):
        return sample_rows.clear()
    sliced_rows = sample_rows.slice(inside_indexes[0], inside_indexes[-1] - inside_indexes[0] + 1)  # a slice copies nothing
    # With several hosts, the rows are not contiguous.
    return sliced_rows if sliced_rows.height == len(inside_indexes) else sample_rows.filter(is_inside)


def select_real_gpus(gpu_samples: pl.DataFrame) -> pl.DataFrame:
    """The samples of real GPUs, without the samples of GPUs that a stub of NVML played."""
    # A filter would copy the frame, which may be large.
    return gpu_samples.filter(~pl.col("played")) if gpu_samples["played"].any() else gpu_samples


def build_sample_frames(samples_by_host: Mapping[str, Sequence[Sample]], sample_parts: Sequence[Samples] = ()) -> Samples:
    """The frames of the samples of one run. sample_parts: more samples of the run, which are already in frames."""
    return Samples(*(sample_rows.drop("run") for sample_rows in build_frames_of_runs([samples_by_host], [sample_parts])))


def build_frames_of_runs(runs: Sequence[Mapping[str, Sequence[Sample]]], parts: Sequence[Sequence[Samples]] = ()) -> Samples:
    """The samples of many runs in one set of frames, because making a frame takes about as long for one run as for a hundred.

    The frames have a column `run_column`: the index of the run in `runs`. parts: for each run, its samples
    that are already in frames."""
    all_parts = []
    for run_index, run_parts in enumerate(parts):
        run_column = pl.lit(run_index, pl.Int64).alias("run")
        all_parts += [Samples(*(sample_rows.with_columns(run_column) for sample_rows in run_part)) for run_part in run_parts]
    all_parts.append(build_sample_part(runs))  # last, because these samples were read after those in the parts of their run
    hosts, nics, gpus, rdma = join_parts(all_parts)
    return Samples(hosts, unify_interface_names(nics), gpus, rdma)


def build_sample_part(samples_by_run: Sequence[Mapping[str, Sequence[Sample]]]) -> Samples:
    """The frames of some samples of many runs, of which `build_frames_of_runs` joins several.

    The frames have the columns FRAME_SCHEMAS: network interfaces still have the names that they have in the samples.
    """
    samples: list[Sample] = []
    sample_counts = []
    for samples_by_host in samples_by_run:
        run_samples = [sample for records in samples_by_host.values() for sample in records]
        samples += sorted(run_samples, key=lambda sample: (sample.host, sample.wall_s))
        sample_counts.append(len(run_samples))
    host_rows = _build_frame(HOST_COLUMNS, samples).insert_column(0, pl.Series("run", _repeat_indexes(sample_counts)))
    copied_values = host_rows.select("run", *COPIED_COLUMNS)
    nic_rows, gpu_rows, rdma_rows = (
        copied_values[_repeat_indexes(list(map(len, devices_of_samples)))].hstack(
            _build_frame(column_types, [device for devices in devices_of_samples for device in devices])
        )
        for column_types, devices_of_samples in (
            (NIC_COLUMNS, [sample.nics or () for sample in samples]),
            (GPU_COLUMNS, [sample.gpus or () for sample in samples]),
            (RDMA_COLUMNS, [sample.rdma or () for sample in samples]),
        )
    )
    is_played, memory_total_bytes = _list_gpu_sample_values(samples)
    total_bytes_column = pl.Series("memory_total_bytes", memory_total_bytes, pl.Int64)
    gpu_rows = gpu_rows.with_columns(pl.Series("played", is_played, pl.Boolean), total_bytes_column)
    return Samples(host_rows, nic_rows, gpu_rows, rdma_rows)


def encode_parquet(samples: Samples) -> list[bytes]:
    """The four frames of a part (`build_sample_part`) as Parquet."""
    byte_streams = [io.BytesIO() for _ in samples]
    for sample_rows, byte_stream in zip(samples, byte_streams, strict=True):
        sample_rows.write_parquet(byte_stream, compression="zstd", statistics=False)
    return [byte_stream.getvalue() for byte_stream in byte_streams]


def decode_parquet(parquet_tables: Sequence[bytes]) -> Samples | None:
    """The part that `encode_parquet` encoded; None if the tables cannot be read, or do not have the columns of a part."""
    try:
        sample_frames = [pl.read_parquet(parquet_table) for parquet_table in parquet_tables]
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return None
    return Samples(*sample_frames) if [sample_frame.schema for sample_frame in sample_frames] == FRAME_SCHEMAS else None


def _list_gpu_sample_values(samples: Sequence[Sample]) -> tuple[list[bool], list[int | None]]:
    """The values of the columns in GPU_SAMPLE_COLUMNS for the GPUs of all samples: (played, memory_total_bytes).

    All GPUs of a sample are played if the first GPU is. The size of the memory is recorded only in the first sample that a
    sampler writes.
    """
    is_played: list[bool] = []
    memory_total_bytes: list[int | None] = []
    for sample in samples:
        if gpus := sample.gpus:
            is_played += [gpus[0].played] * len(gpus)
            memory_total_bytes += [None] * len(gpus) if sample.started_hz is None else [gpu.memory_total_bytes for gpu in gpus]
    return is_played, memory_total_bytes


def join_parts(sample_parts: Sequence[Samples]) -> Samples:
    """Join several parts into one set of frames, stably sorted by run, host and wall_s."""
    nonempty_parts = [part for part in sample_parts if part.hosts.height]
    if len(nonempty_parts) < 2:
        return nonempty_parts[0] if nonempty_parts else sample_parts[-1]
    edge_keys = [
        ((_get_sort_key(part.hosts, 0), index), (_get_sort_key(part.hosts, -1), index))
        for index, part in enumerate(nonempty_parts)
    ]
    order_by_start = sorted(range(len(nonempty_parts)), key=lambda index: edge_keys[index][0])
    if all(edge_keys[before][1] < edge_keys[later_index][0] for before, later_index in itertools.pairwise(order_by_start)):
        return _concatenate_samples([nonempty_parts[index] for index in order_by_start])
    return Samples(*(rows.sort("run", "host", "wall_s", maintain_order=True) for rows in _concatenate_samples(nonempty_parts)))


def _concatenate_samples(sample_parts: Sequence[Samples]) -> Samples:
    return Samples(*(pl.concat(frames_of_parts) for frames_of_parts in zip(*sample_parts, strict=True)))


def _get_sort_key(host_rows: pl.DataFrame, row_index: int) -> tuple[Any, ...]:
    """The values by which frames are sorted, in one row of `host_rows`."""
    return host_rows.select("run", "host", "wall_s").row(row_index)


def _repeat_indexes(repeat_counts: Sequence[int]) -> np.ndarray:
    """Each index, repeated as often as its count says: [2, 1] gives [0, 0, 1]."""
    return np.repeat(np.arange(len(repeat_counts)), np.array(repeat_counts, int))


def _build_frame(column_types: Mapping[str, Any], records: Sequence[Record]) -> pl.DataFrame:
    """A frame with a row for each record and a column for each field in `column_types`."""
    values_by_column = zip(*map(attrgetter(*column_types), records)) if records else ((),) * len(column_types)
    series = zip(column_types.items(), values_by_column, strict=True)
    return pl.DataFrame([_build_series(name, values, column_type) for (name, column_type), values in series])


def _build_series(column_name: str, column_values: Sequence[Any], column_type: Any) -> pl.Series:
    """Make a column of a frame. Each distinct list is converted only once, because converting is slow."""
    if not isinstance(column_type, pl.List):
        return pl.Series(column_name, column_values, column_type)
    if not any(column_values) and len(column_values) and None not in column_values:  # the usual case: all lists are empty
        return pl.Series(column_name, [[]], column_type)[np.zeros(len(column_values), np.uint32)]
    index_by_value: dict[tuple[Any, ...] | None, int] = {}
    rows = [index_by_value.setdefault(None if value is None else tuple(value), len(index_by_value)) for value in column_values]
    distinct_values = [None if value is None else list(value) for value in index_by_value]
    return pl.Series(column_name, distinct_values, column_type, strict=False)[np.array(rows, np.uint32)]


class InterfaceSpan(msgspec.Struct):
    """A network interface during the time in which its name and its addresses stay the same."""

    run: int
    """The index of the run."""
    host: str
    kind: str
    name: str
    mac: str | None
    """The MAC address of the interface; None if not known."""
    pci: str | None
    """The PCI address of the interface; None if not known."""
    first_s: float
    """The time of the first sample of the interface, in seconds since the epoch."""
    last_s: float
    """The time of the last sample of the interface, in seconds since the epoch."""
    unique_name: str = ""
    """The name that all samples of the interface get."""

    def is_continued_by(self, later_span: InterfaceSpan) -> bool:
        """Whether `later_span` is the same interface with a new name or a new MAC address, so that its counters continue."""
        if self.last_s > later_span.first_s or (self.kind, self.pci) != (later_span.kind, later_span.pci):
            return False
        has_same_address = self.mac is not None and self.mac == later_span.mac
        return has_same_address or (self.pci is not None and self.name == later_span.name)


def unify_interface_names(nic_rows: pl.DataFrame) -> pl.DataFrame:
    """Give each network interface the same unique name in all its samples of a run, and drop IDENTITY_COLUMN_TYPES.

    If udev renamed an interface, all its samples get its last name. If an interface was removed and created again, or took the
    name of another interface, then two interfaces with different counters have the same name. In this case, the interface that
    was seen last keeps the name, such as `eth0`, and the earlier interface is called `eth0 (2)`.
    """
    distinct_keys = nic_rows.select(_IDENTITY_KEYS).unique()
    names_of_hosts = distinct_keys.select("run", "host", "name")
    identities_of_hosts = distinct_keys.select("run", "host", "kind", *IDENTITY_COLUMN_TYPES)
    if names_of_hosts.n_unique() == identities_of_hosts.n_unique() == distinct_keys.height:
        return nic_rows.drop(IDENTITY_COLUMN_TYPES)
    span_rows = nic_rows.group_by(_IDENTITY_KEYS, maintain_order=True).agg(first_s=pl.min("wall_s"), last_s=pl.max("wall_s"))
    interface_spans = [InterfaceSpan(**row) for row in span_rows.iter_rows(named=True)]
    interface_spans.sort(key=attrgetter("last_s", "first_s", "name"), reverse=True)
    for host_key in dict.fromkeys((interface.run, interface.host) for interface in interface_spans):
        _set_unique_names(interface for interface in interface_spans if (interface.run, interface.host) == host_key)
    name_columns = {key: [getattr(interface, key) for interface in interface_spans] for key in (*_IDENTITY_KEYS, "unique_name")}
    unique_names = pl.DataFrame(name_columns, {key: nic_rows.schema.get(key, pl.String) for key in name_columns})
    named_nics = nic_rows.join(unique_names, on=_IDENTITY_KEYS, how="left", nulls_equal=True, maintain_order="left")
    return named_nics.with_columns(name=pl.col("unique_name")).drop(*IDENTITY_COLUMN_TYPES, "unique_name")


def _set_unique_names(interface_spans: Iterable[InterfaceSpan]) -> None:
    """Set `unique_name` of each span of one host in one run, the same for spans of the same interface.

    interface_spans: the spans, the latest first, by their last sample.
    """
    earliest_spans: list[InterfaceSpan] = []  # the earliest span of each interface that has a name so far
    names_in_use: set[str] = set()
    for interface_span in interface_spans:
        index = next((index for index, other in enumerate(earliest_spans) if interface_span.is_continued_by(other)), None)
        if index is not None:
            interface_span.unique_name = earliest_spans[index].unique_name
            earliest_spans[index] = interface_span
            continue
        name_number, interface_span.unique_name = 1, interface_span.name
        while interface_span.unique_name in names_in_use:
            name_number += 1
            interface_span.unique_name = f"{interface_span.name} ({name_number})"
        names_in_use.add(interface_span.unique_name)
        earliest_spans.append(interface_span)
