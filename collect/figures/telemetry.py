"""Draws telemetry during training, one panel per quantity, all with the same time axis: of the hosts, and of each GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from collect.drawing.curves import STRETCHES, Combination, join_devices, make_growth_readings, read_levels, read_rates
from collect.drawing.panels import draw_curves, draw_panels
from collect.figure import PLAYED, SERIES, Figure, WorkloadGroup, describe_rest, escape, note_played, order_by_visibility
from collect.loading.loaded_run import LoadedRun
from collect.metrics.network import select_loopback_samples, select_network_samples
from collect.metrics.utilization import add_memory_shares, find_memory_sizes
from collect.strategy_style import DASHES, Look
from shardlab.terminal.notation import GIB, MB

MOST_LINES = 64  # the most GPUs that are drawn: nobody can follow more lines, and each GPU has a line in up to eleven panels
VISIBLE_LINES = 16  # lines that are visible when the page opens: the GPUs of the first cells
UUID_CHARS = 12  # the legend shows this many characters of a UUID, or more if the GPUs of a host would look alike
MOST_INTERFACES = 3  # the most network interfaces that have their own panels; the interfaces with the most traffic get them


class RunSamples(NamedTuple):
    """The samples of all runs that are drawn.

    In each frame, the column `run` contains the label of the cell, and wall_s counts from the first timed step of the run.
    """

    hosts: pl.DataFrame
    nics: pl.DataFrame
    gpus: pl.DataFrame
    memory_shares: pl.DataFrame
    """GPU memory in use, as a share of the whole memory of the GPU."""


class TelemetryPanel(NamedTuple):
    """A panel of the figure, which shows one quantity."""

    title: str
    """The quantity and its unit."""
    unit_size: float
    """How many units of the readings make one unit of the title, such as 2^30 bytes for GiB."""
    combination: Combination
    """How the values of all devices are combined (`curves.join_devices`)."""
    get_readings: Callable[[RunSamples], pl.DataFrame]
    """Makes readings from the samples, as `curves.read_levels`."""


def draw_hosts(group: WorkloadGroup) -> Figure | None:
    """Draw one line per cell in each panel, as in studies 1 and 3, for the first completed repeat that did not resume from a
    checkpoint."""
    runs_with_window = [(mark, run, run.timed_window) for mark in group.marks if (run := mark.unresumed_run) is not None]
    runs_by_label = {mark.label: (mark, run, window[0]) for mark, run, window in runs_with_window if window}
    if not runs_by_label:
        return None
    samples = _collect_samples({label: (run, start_s) for label, (_, run, start_s) in runs_by_label.items()})
    network_panels, left_out_count = _make_network_panels(samples.nics)
    looks, panels = {label: mark.look for label, (mark, _, _) in runs_by_label.items()}, []
    played_labels = [label for label, (_, run, _) in runs_by_label.items() if run.plays_gpus]
    for panel in (*(SHARED_GPU_PANELS if len(samples.gpus) else ()), *network_panels, *HOST_PANELS):
        traces = draw_curves(
            join_devices(panel.get_readings(samples), panel.combination), panel.unit_size, looks, has_marks=True
        )
        if traces:
            is_played = panel in SHARED_GPU_PANELS and not traces.keys().isdisjoint(played_labels)
            panels.append((f"{panel.title}{PLAYED * is_played}", traces))
    lines = {
        mark.label: {"name": mark.label, "meta": mark.row.id, "visible": visible, "line": mark.look.line | {"width": 1.5}}
        for mark, visible in order_by_visibility([mark for mark, _, _ in runs_by_label.values()])
    }
    caption = (
        "First completed repeat of each cell. Each point is the mean (for GPU memory the maximum) over "
        f"1/{STRETCHES} of the run, or over the time between two samples if that is longer. A line has a gap where a "
        "host has no samples. GPUs and processors: all of the hosts. Dotted: the end of the first timed step."
    )
    if len(network_panels) > 4:  # one panel for the sum, one for loopback, two per interface: several interfaces
        caption += " Interfaces are distinguished by their names; the records do not say which is the control network."
    if left_out_count:
        caption += f" {left_out_count} more interfaces, which sent less, are not drawn."
    return draw_panels("telemetry", "Telemetry", caption + note_played(played_labels), panels, lines) if panels else None


def _collect_samples(spans: Mapping[str, tuple[LoadedRun, float]]) -> RunSamples:
    def concatenate_frames(get_frame: Callable[[LoadedRun], pl.DataFrame]) -> pl.DataFrame:
        run_frames = (
            get_frame(run).with_columns(pl.col("wall_s") - zero_s, run=pl.lit(label)) for label, (run, zero_s) in spans.items()
        )
        return pl.concat(run_frames, rechunk=True)

    return RunSamples(
        concatenate_frames(lambda run: run.samples.hosts),
        concatenate_frames(lambda run: run.samples.nics),
        concatenate_frames(lambda run: run.samples.gpus),
        concatenate_frames(lambda run: add_memory_shares(run.samples.gpus, run.hosts)),
    )


def _make_network_panels(nics: pl.DataFrame) -> tuple[list[TelemetryPanel], int]:
    """(panels for network interfaces and loopback, number of interfaces without panels).

    The first panel has the bytes of all interfaces together, added up over time. Then each of the busiest interfaces has two
    panels, for sent and for received bytes. Interfaces without traffic have no panels. Loopback has one panel.
    """
    counter_growths = [pl.max(counter) - pl.min(counter) for counter in ("tx_bytes", "rx_bytes")]
    carried_bytes = select_network_samples(nics).group_by("run", "host", "name").agg(carried=pl.sum_horizontal(counter_growths))
    carried = dict(carried_bytes.group_by("name").agg(pl.sum("carried")).iter_rows())
    names = [nic for nic in sorted(carried, key=lambda nic: (-carried[nic], nic)) if carried[nic]]
    directions = (("Sent", "tx_bytes"), ("Received", "rx_bytes"))
    drawn_names = names[:MOST_INTERFACES]
    panels = [_make_interface_panel(nic, direction, counter) for nic in drawn_names for direction, counter in directions]
    return [*([TOTAL_SENT_PANEL] if names else []), *panels, LOOPBACK_PANEL], max(len(names) - MOST_INTERFACES, 0)


def _make_interface_panel(interface_name: str, direction: str, counter: str) -> TelemetryPanel:
    return TelemetryPanel(
        f"{direction} on the network, {escape(interface_name)} (MB/s)",
        MB,
        "sum",
        lambda samples: read_rates(select_network_samples(samples.nics).filter(pl.col("name") == interface_name), counter),
    )


def _make_counter_panel(title: str, counter_column: str, scale: float = MB, combination: Combination = "sum") -> TelemetryPanel:
    """A panel for a counter of the hosts, such as of bytes. A run has no line if its counter did not grow."""
    has_grown = pl.col(counter_column).max().over("run") > pl.col(counter_column).min().over("run")
    return TelemetryPanel(
        title, scale, combination, lambda samples: read_rates(samples.hosts.filter(has_grown), counter_column, "host")
    )


def _make_host_panel(title: str, column: str, unit_size: float = 1) -> TelemetryPanel:
    return TelemetryPanel(title, unit_size, "mean", lambda samples: read_levels(samples.hosts, "host", column))


SHARED_GPU_PANELS = (
    TelemetryPanel("GPU memory in use (%)", 1, "max", lambda samples: read_levels(samples.memory_shares, "uuid", "memory_pct")),
    TelemetryPanel("GPUs busy (%)", 1, "mean", lambda samples: read_levels(samples.gpus, "uuid", "utilization_pct")),
)
TOTAL_SENT_PANEL = TelemetryPanel(
    "All bytes sent on the network since the first timed step (MB)",
    MB,
    "sum",
    lambda samples: make_growth_readings(select_network_samples(samples.nics), "tx_bytes"),
)
LOOPBACK_PANEL = TelemetryPanel(
    "Sent over loopback, within a host (MB/s)",
    MB,
    "sum",
    lambda samples: read_rates(select_loopback_samples(samples.nics), "tx_bytes"),
)
HOST_PANELS = (
    _make_host_panel("Processors busy (%)", "cpu_pct"),
    _make_host_panel("Busiest processor (%)", "busiest_core_pct"),
    _make_host_panel("Memory of the hosts in use (GiB)", "memory_used_bytes", GIB),
    # The counters of waiting are in seconds, so that a rate of 0.01 is 1 % of the time.
    _make_counter_panel("Tasks waiting for processors (% of time)", "cpu_pressure_s", 0.01, "mean"),
    _make_counter_panel("Tasks waiting for memory (% of time)", "memory_pressure_s", 0.01, "mean"),
    _make_counter_panel("Tasks waiting for disks and network storage (% of time)", "io_pressure_s", 0.01, "mean"),
    _make_counter_panel("Read from disks (MB/s)", "disk_read_bytes"),
    _make_counter_panel("Written to disks (MB/s)", "disk_write_bytes"),
    _make_counter_panel("Received from NFS servers (MB/s)", "nfs_read_bytes"),
    _make_counter_panel("Sent to NFS servers (MB/s)", "nfs_write_bytes"),
)


class GpuPanel(NamedTuple):
    """A panel of the figure, which shows one quantity of all GPUs."""

    title: str
    """The quantity and its unit."""
    unit_size: float
    """How many units of the column make one unit of the title, such as 2^30 bytes for GiB."""
    column: str
    """The column of the GPU samples that the panel shows."""
    is_counter: bool = False
    """Whether the column is a counter: then the panel shows its growth per second."""


GPU_PANELS = (
    GpuPanel("GPU busy (%)", 1, "utilization_pct"),
    GpuPanel("Memory in use (GiB)", GIB, "memory_used_bytes"),
    GpuPanel("Memory in use (%)", 1, "memory_pct"),
    GpuPanel("Power (W)", 1, "power_w"),
    GpuPanel("Temperature (°C)", 1, "temperature_c"),
    GpuPanel("SM clock (MHz)", 1, "sm_clock_mhz"),
    GpuPanel("Memory clock (MHz)", 1, "memory_clock_mhz"),
    GpuPanel("Sent over PCIe (MB/s)", MB, "pcie_tx_bytes", is_counter=True),
    GpuPanel("Received over PCIe (MB/s)", MB, "pcie_rx_bytes", is_counter=True),
    GpuPanel("Sent over NVLink (MB/s)", MB, "nvlink_tx_bytes", is_counter=True),
    GpuPanel("Received over NVLink (MB/s)", MB, "nvlink_rx_bytes", is_counter=True),
)


def draw_gpus(group: WorkloadGroup) -> Figure | None:
    """Draw one line per GPU in each panel, for the first completed repeat of each cell that did not resume from a checkpoint,
    as in figures 11 to 19 of study 3. A mean over GPUs would hide a single slow GPU."""
    gpu_frames: list[pl.DataFrame] = []
    look_by_key: dict[str, Look] = {}
    lines: dict[str, dict[str, Any]] = {}
    played_labels: list[str] = []  # labels of the cells whose GPU values a stub of NVML made up
    left_out_count = 0
    for mark in group.marks:
        run = mark.unresumed_run
        if run is None or run.timed_window is None or run.shown_gpu_samples.is_empty():
            continue
        gpu_devices = sorted(run.shown_gpu_samples.select("host", "uuid").unique().rows())
        if len(lines) + len(gpu_devices) > MOST_LINES:
            left_out_count += len(gpu_devices)
            continue
        key_by_gpu = {device: f"{len(gpu_frames)} {index}" for index, device in enumerate(gpu_devices)}
        for index, ((host, _), uuid) in enumerate(zip(gpu_devices, _shorten_uuids(gpu_devices), strict=True)):
            # GPUs of the same cell differ in colour, and cells differ in dash.
            look = Look(SERIES[index % len(SERIES) + 1], dash=DASHES[len(gpu_frames) % len(DASHES)])
            name, key = f"{mark.label}, {escape(f'{host} {uuid}')}{PLAYED * run.plays_gpus}", key_by_gpu[gpu_devices[index]]
            look_by_key[key], lines[key] = look, {"name": name, "meta": mark.row.id, "line": look.line | {"width": 1.5}}
        played_labels += [mark.label] * run.plays_gpus
        gpu_frames.append(_select_gpu_rows(run, run.timed_window[0], key_by_gpu))
    if not gpu_frames:
        return None
    gpus, panels = pl.concat(gpu_frames, rechunk=True), []
    for panel in GPU_PANELS:
        readings = read_rates(gpus, panel.column, "uuid") if panel.is_counter else read_levels(gpus, "uuid", panel.column)
        if trace_by_key := draw_curves(join_devices(readings, "mean"), panel.unit_size, look_by_key):
            panels.append((f"{panel.title}{PLAYED * bool(played_labels)}", trace_by_key))
    drawn_keys = [key for key in lines if any(key in trace_by_key for _, trace_by_key in panels)]
    lines = {
        key: lines[key] | {"visible": True if index < VISIBLE_LINES else "legendonly"} for index, key in enumerate(drawn_keys)
    }
    caption = (
        "First completed repeat of each cell; one line per GPU that its ranks trained on. Each point is the "
        f"mean over 1/{STRETCHES} of the run, or over the time between two samples if that is longer. A line has a "
        "gap where a GPU gave no value. Dotted: the end of the first timed step."
    )
    caption += describe_rest(left_out_count, "GPUs") + note_played(played_labels)
    return draw_panels("gpus", "Each GPU", caption, panels, lines) if panels else None


def _select_gpu_rows(run: LoadedRun, start_s: float, keys: dict[tuple[Any, ...], str]) -> pl.DataFrame:
    """The samples of the GPUs of a run. In the result, the column `run` is the key of a GPU's line.

    start_s: the time from which wall_s counts in the result. keys: (host, uuid) of each GPU -> the key of its line.
    """
    key_rows = pl.DataFrame([(*device, key) for device, key in keys.items()], schema=["host", "uuid", "run"], orient="row")
    gpu_samples = run.shown_gpu_samples.join(key_rows, on=["host", "uuid"], maintain_order="left")
    memory_bytes_by_uuid = find_memory_sizes(run.shown_gpu_samples, run.hosts)
    total_bytes = pl.col("uuid").replace_strict(memory_bytes_by_uuid, return_dtype=pl.Float64, default=None)
    return gpu_samples.with_columns(pl.col("wall_s") - start_s, memory_pct=100 * pl.col("memory_used_bytes") / total_bytes)


def _shorten_uuids(devices: Sequence[tuple[str, str]]) -> list[str]:
    """The beginning of each UUID, for the legend: UUID_CHARS characters, or as many more as the GPUs of a host need to differ.

    devices: (host, UUID) of each GPU.
    """
    longest_length = max(len(uuid) for _, uuid in devices)
    lengths = range(UUID_CHARS, longest_length + 1)
    length = next((n for n in lengths if len({(host, uuid[:n]) for host, uuid in devices}) == len(devices)), longest_length)
    return [uuid[:length] for _, uuid in devices]
