"""Metrics of the utilization of processors, GPUs and GPU memory while steps were timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

import numpy as np
import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.sources.device_rows import DeviceRows
from collect.sources.samples import select_in_window
from shardlab.hardware.host import Host


def average_cpu_utilization(run: LoadedRun) -> Quantity | None:
    """The utilization of all processors of a host in percent: the mean over the samples in the timed window, then over the
    hosts."""
    host_samples = run.whole_samples.hosts
    return None if host_samples.is_empty() else _average_over_devices(run, DeviceRows(host_samples, ["host"]), "cpu_pct")


def find_peak_cpu_utilization(run: LoadedRun) -> Quantity | None:
    """The highest utilization of all processors of a host in a sample of the timed window, over the hosts, in percent."""
    if run.timed_window is None:
        return None
    return _find_highest_share(select_in_window(run.whole_samples.hosts, run.timed_window)["cpu_pct"].drop_nulls())


def average_rank_cpu_utilization(run: LoadedRun) -> Quantity | None:
    """The processor time of a rank in percent of the elapsed time, as the mean over ranks. 100 means one fully used processor.

    None if a step record does not contain cpu_s, or if the run was suspended.
    """
    if run.was_suspended or run.timed_steps.is_empty() or run.timed_steps["cpu_s"].null_count():
        return None
    rank_growths = run.timed_steps.group_by("rank", maintain_order=True).agg(
        pl.col(column).last() - pl.col(column).first() for column in ("cpu_s", "t_s")
    )
    # a rank was restarted, or has only one timed step
    if not (rank_growths["cpu_s"] >= 0).all() or not (rank_growths["t_s"] > 0).all():
        return None
    return Quantity(fmean((100 * rank_growths["cpu_s"] / rank_growths["t_s"]).to_list()), "%")


def average_gpu_utilization(run: LoadedRun) -> Quantity | None:
    """The utilization of a GPU in percent: the mean over the samples in the timed window, then over the GPUs."""
    return None if run.gpu_samples.is_empty() else _average_over_devices(run, run.gpu_rows, "utilization_pct")


def find_peak_gpu_memory(run: LoadedRun) -> Quantity | None:
    """The highest share of a GPU's memory that was in use, over the GPUs and samples of the timed window, in percent.

    None if the memory size of any of these GPUs is not known.
    """
    if run.gpu_samples.is_empty() or (timed_window := run.timed_window) is None:
        return None
    memory_rows = run.gpu_samples.select("wall_s", "uuid", "memory_used_bytes", "memory_total_bytes")
    # The sizes may be in a sample from before the window, so the shares are computed of all samples.
    return _find_highest_share(select_in_window(add_memory_shares(memory_rows, run.hosts), timed_window)["memory_pct"])


def _find_highest_share(shares_pct: pl.Series) -> Quantity | None:
    return Quantity(float(shares_pct.sort()[-1]), "%") if shares_pct.len() else None


def add_memory_shares(gpu_samples: pl.DataFrame, hosts: Sequence[Host]) -> pl.DataFrame:
    """The GPU samples with an additional column memory_pct: the memory in use, in percent of the memory of the GPU.

    Returns no rows if the memory size of any of the GPUs is not known. hosts: the descriptions of the hosts.
    """
    bytes_by_uuid = find_memory_sizes(gpu_samples, hosts)
    samples = gpu_samples.drop_nulls("memory_used_bytes")
    if not set(samples["uuid"].unique()) <= bytes_by_uuid.keys():
        samples = samples.clear()
    memory_size = pl.col("uuid").replace_strict(bytes_by_uuid, return_dtype=pl.Float64, default=None)
    return samples.with_columns(memory_pct=100 * pl.col("memory_used_bytes") / memory_size)


def find_memory_sizes(gpu_samples: pl.DataFrame, hosts: Sequence[Host]) -> dict[str, int]:
    """The memory of GPUs in bytes, for GPUs whose size is known: {UUID: bytes}.

    gpu_samples: samples of GPUs; the first sample that a sampler writes contains the sizes. hosts: the descriptions of the
    hosts, which contain the sizes too, and have priority.
    """
    sampled_bytes = gpu_samples.select("uuid", "memory_total_bytes").drop_nulls().filter(pl.col("memory_total_bytes") > 0)
    described_bytes = {gpu.uuid: gpu.memory_bytes for host in hosts for gpu in host.gpus or () if gpu.memory_bytes}
    return dict(sampled_bytes.iter_rows()) | described_bytes


def _average_over_devices(run: LoadedRun, device_rows: DeviceRows, column: str) -> Quantity | None:
    """The mean over the samples of a device in the timed window, then over the devices. The last key of a device names it."""
    if run.timed_window is None:
        return None
    values_by_device: dict[str, list[np.ndarray]] = {}
    for device, (sample_times_s, values) in device_rows.get_values(column).items():
        first_index = sample_times_s.searchsorted(run.timed_window[0], "left")
        last_index = sample_times_s.searchsorted(run.timed_window[1], "right")
        if first_index < last_index:
            values_by_device.setdefault(device[-1], []).append(values[first_index:last_index])
    device_means = [float(np.concatenate(device_values).mean()) for device_values in values_by_device.values()]
    return Quantity(sum(device_means) / len(device_means), "%") if device_means else None


_make_share_metric = partial(Metric, unit="%", direction="neither")
METRICS = (
    _make_share_metric(
        name="cpu_pct",
        column=MetricColumn("summary", 60, "CPU", 3),
        of_all_steps=True,
        definition="Share of all processors of a host that was busy, with any process, between the first and the last "
        "timed step; mean over hosts.",
        of_run=average_cpu_utilization,
        reads=Reads(samples="window"),
    ),
    _make_share_metric(
        name="cpu_peak_pct",
        of_all_steps=True,
        definition="Highest share of all processors of a host that was busy between two samples (`telemetry_hz`), "
        "with any process, between the first and the last timed step.",
        of_run=find_peak_cpu_utilization,
        reads=Reads(samples="window"),
    ),
    _make_share_metric(
        name="rank_cpu_pct",
        of_all_steps=True,
        definition="Processor time of a rank, all its threads, over the time between its first and its last timed "
        "step, as the kernel counts it for each process: 100 % is one processor; mean over ranks.",
        of_run=average_rank_cpu_utilization,
        reads=Reads(steps="timed", events=True),
    ),
    _make_share_metric(
        name="gpu_pct",
        column=MetricColumn("summary", 70, "GPU", 3),
        of_all_steps=True,
        definition="NVML's GPU utilization (share of time with a kernel running) between the first and the last timed "
        "step; mean over the GPUs that the run trained on.",
        of_run=average_gpu_utilization,
        reads=Reads(samples="window", result=("gpus",)),
    ),
    _make_share_metric(
        name="gpu_memory_pct",
        column=MetricColumn("memory", 110, "GPU memory", 3),
        definition="Highest share of a GPU's memory in use by any process (including libraries and memory that the "
        "allocator keeps for later), from NVML; over the GPUs of the run and the samples between the first and the "
        "last timed step.",
        of_run=find_peak_gpu_memory,
        reads=Reads(samples="window", result=("gpus",), hosts=("gpus.uuid", "gpus.memory_bytes")),
    ),
)
