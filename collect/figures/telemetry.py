"""Draws the telemetry of the hosts during training, one panel per quantity, all with the same time axis, as in studies 1 and
3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import polars as pl

from collect.drawing.curves import STRETCHES, Combination, growth_readings, join_devices, level_readings, rate_readings
from collect.drawing.panels import curve_trace, draw_panels, is_a_line, scale_curve
from collect.figure import MAX_MARKED, PLAYED, Figure, Group, escape, order_by_visibility, played_note
from collect.loading.loaded_run import LoadedRun
from collect.metrics.network import select_loopback_samples, select_network_samples
from collect.metrics.utilization import add_memory_shares
from collect.notation import GIB, MB
from collect.sources.steps import find_timed_window

MOST_INTERFACES = 3  # the most network interfaces that have their own panels; the interfaces with the most traffic get them


class RunSamples(NamedTuple):
    """The samples of all runs that are drawn.

    In each frame, the column `run` contains the label of the cell, and wall_s counts from the first timed step of the run.
    """

    hosts: pl.DataFrame
    nics: pl.DataFrame
    gpus: pl.DataFrame
    shares: pl.DataFrame
    """GPU memory in use, as a share of the whole memory of the GPU."""


class TelemetryPanel(NamedTuple):
    """A panel of the figure, which shows one quantity."""

    title: str
    """The quantity and its unit."""
    scale: float
    """How many units of the readings make one unit of the title, such as 2^30 bytes for GiB."""
    combination: Combination
    """How the values of all devices are combined (`curves.join_devices`)."""
    readings: Callable[[RunSamples], pl.DataFrame]
    """Makes readings from the samples, as `curves.level_readings`."""


def draw(group: Group) -> Figure | None:
    """Draw one line per cell in each panel, for the first completed repeat that did not resume from a checkpoint."""
    runs = [(mark, run, find_timed_window(run.timed)) for mark in group.marks if (run := mark.unresumed_run) is not None]
    timed = {mark.label: (mark, run, window[0]) for mark, run, window in runs if window}
    if not timed:
        return None
    samples = _collect_samples({label: (run, start_s) for label, (_, run, start_s) in timed.items()})
    networks, left_out_count = _network_panels(samples.nics)
    panels = []
    played = [label for label, (_, run, _) in timed.items() if run.plays_gpus]
    for panel in (*(GPU if len(samples.gpus) else ()), *networks, *HOST):
        curves = join_devices(panel.readings(samples), panel.combination)
        traces = {}
        for label, curve in curves.items():
            if is_a_line(curve):
                look = timed[label][0].look
                marker = look.marks(4) if len(curve.values) <= MAX_MARKED else look.sparse_marks
                traces[label] = curve_trace(scale_curve(curve, panel.scale), "lines+markers", marker)
        if traces:
            is_played = panel in GPU and not traces.keys().isdisjoint(played)
            panels.append((f"{panel.title}{PLAYED * is_played}", traces))
    if not panels:
        return None
    lines = {
        mark.label: {"name": mark.label, "meta": mark.row.id, "visible": visible, "line": mark.look.line | {"width": 1.5}}
        for mark, visible in order_by_visibility([mark for mark, _, _ in timed.values()])
    }
    caption = (
        f"First completed repeat of each cell. Each point is the mean (for GPU memory the maximum) over 1/{STRETCHES} of the "
        "run, or over the time between two samples if that is longer. A line has a gap where a host has no samples. GPUs and "
        "processors: all of the hosts. Dotted: the end of the first timed step."
    )
    if len(networks) > 4:  # one panel for the sum, one for loopback, two per interface: several interfaces
        caption += " Interfaces are distinguished by their names; the records do not say which is the control network."
    if left_out_count:
        caption += f" {left_out_count} more interfaces, which sent less, are not drawn."
    return draw_panels("telemetry", "Telemetry", caption + played_note(played), panels, lines)


def _collect_samples(spans: Mapping[str, tuple[LoadedRun, float]]) -> RunSamples:
    def concatenate_frames(get_frame: Callable[[LoadedRun], pl.DataFrame]) -> pl.DataFrame:
        frames = (
            get_frame(run).with_columns(pl.col("wall_s") - zero_s, run=pl.lit(label)) for label, (run, zero_s) in spans.items()
        )
        return pl.concat(frames, rechunk=True)

    return RunSamples(
        concatenate_frames(lambda run: run.samples.hosts),
        concatenate_frames(lambda run: run.samples.nics),
        concatenate_frames(lambda run: run.samples.gpus),
        concatenate_frames(lambda run: add_memory_shares(run.samples.gpus, run.hosts)),
    )


def _network_panels(nics: pl.DataFrame) -> tuple[list[TelemetryPanel], int]:
    """(panels for network interfaces and loopback, number of interfaces without panels).

    The first panel has the bytes of all interfaces together, added up over time. Then each of the busiest interfaces has two
    panels, for sent and for received bytes. Interfaces without traffic have no panels. Loopback has one panel.
    """
    increases = [pl.max(field) - pl.min(field) for field in ("tx_bytes", "rx_bytes")]
    counted = select_network_samples(nics).group_by("run", "host", "name").agg(carried=pl.sum_horizontal(increases))
    carried = dict(counted.group_by("name").agg(pl.sum("carried")).iter_rows())
    names = [name for name in sorted(carried, key=lambda name: (-carried[name], name)) if carried[name]]
    directions = (("Sent", "tx_bytes"), ("Received", "rx_bytes"))
    panels = [_interface_panel(name, direction, field) for name in names[:MOST_INTERFACES] for direction, field in directions]
    return [*([TOTAL_SENT] if names else []), *panels, LOOPBACK], max(len(names) - MOST_INTERFACES, 0)


def _interface_panel(name: str, direction: str, counter: str) -> TelemetryPanel:
    return TelemetryPanel(
        f"{direction} on the network, {escape(name)} (MB/s)",
        MB,
        "sum",
        lambda samples: rate_readings(select_network_samples(samples.nics).filter(pl.col("name") == name), counter),
    )


def _counter_panel(title: str, counter: str, scale: float = MB, combination: Combination = "sum") -> TelemetryPanel:
    """A panel for a counter of the hosts, such as of bytes. A run has no line if its counter did not grow."""
    has_grown = pl.col(counter).max().over("run") > pl.col(counter).min().over("run")
    return TelemetryPanel(
        title, scale, combination, lambda samples: rate_readings(samples.hosts.filter(has_grown), counter, "host")
    )


def _host_panel(title: str, column: str, scale: float = 1) -> TelemetryPanel:
    return TelemetryPanel(title, scale, "mean", lambda samples: level_readings(samples.hosts, "host", column))


GPU = (
    TelemetryPanel("GPU memory in use (%)", 1, "max", lambda samples: level_readings(samples.shares, "uuid", "memory_pct")),
    TelemetryPanel("GPUs busy (%)", 1, "mean", lambda samples: level_readings(samples.gpus, "uuid", "utilization_pct")),
)
TOTAL_SENT = TelemetryPanel(
    "All bytes sent on the network since the first timed step (MB)",
    MB,
    "sum",
    lambda samples: growth_readings(select_network_samples(samples.nics), "tx_bytes"),
)
LOOPBACK = TelemetryPanel(
    "Sent over loopback, within a host (MB/s)",
    MB,
    "sum",
    lambda samples: rate_readings(select_loopback_samples(samples.nics), "tx_bytes"),
)
HOST = (
    _host_panel("Processors busy (%)", "cpu_pct"),
    _host_panel("Busiest processor (%)", "busiest_core_pct"),
    _host_panel("Memory of the hosts in use (GiB)", "memory_used_bytes", GIB),
    # The counters of waiting are in seconds, so that a rate of 0.01 is 1 % of the time.
    _counter_panel("Tasks waiting for processors (% of time)", "cpu_pressure_s", 0.01, "mean"),
    _counter_panel("Tasks waiting for memory (% of time)", "memory_pressure_s", 0.01, "mean"),
    _counter_panel("Tasks waiting for disks and network storage (% of time)", "io_pressure_s", 0.01, "mean"),
    _counter_panel("Read from disks (MB/s)", "disk_read_bytes"),
    _counter_panel("Written to disks (MB/s)", "disk_write_bytes"),
    _counter_panel("Received from NFS servers (MB/s)", "nfs_read_bytes"),
    _counter_panel("Sent to NFS servers (MB/s)", "nfs_write_bytes"),
)
