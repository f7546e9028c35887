"""Draws the telemetry of the hosts during training, one panel per quantity, all with the same time axis, as in studies 1 and
3."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import polars as pl

from collect.drawing.curves import STRETCHES, Combination, Curve, growth_readings, join_devices, level_readings, rate_readings
from collect.drawing.panels import PANEL_PX, invisible_lines, is_a_line, scale_curve, stacked_layout, y_axis_name
from collect.figure import LEGEND_HEIGHT_PX, MAX_MARKED, PLAYED, CellMark, Figure, Group, order_by_visibility, played_note
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
    timed = [(mark, run, find_timed_window(run.timed)) for mark in group.marks if (run := _unresumed_run(mark)) is not None]
    spans = {mark.label: (run, timed_window[0]) for mark, run, timed_window in timed if timed_window}
    if not spans:
        return None
    visible_marks = order_by_visibility([mark for mark, _, timed_window in timed if timed_window])
    samples = _collect_samples(spans)
    networks, left_out_count = _network_panels(samples.nics)
    panels: list[tuple[str, dict[str, Curve]]] = []
    played = [label for label, (run, _) in spans.items() if run.plays_gpus]
    for panel in (*(GPU if len(samples.gpus) else ()), *networks, *HOST):
        curves = join_devices(panel.readings(samples), panel.combination)
        if panel_curves := {label: scale_curve(curve, panel.scale) for label, curve in curves.items() if is_a_line(curve)}:
            is_played = panel in GPU and not panel_curves.keys().isdisjoint(played)
            panels.append((f"{panel.title}{PLAYED * is_played}", panel_curves))
    if not panels:
        return None
    legend_labels: set[str] = set()
    data: list[dict[str, Any]] = []
    for number, (_, curves) in enumerate(panels, 1):
        for mark, visible in visible_marks:
            if mark.label in curves:
                data.append(_cell_trace(mark, curves[mark.label], number, visible, in_legend=mark.label not in legend_labels))
                legend_labels.add(mark.label)
    caption = (
        f"First completed repeat of each cell. Each point is the mean (for GPU memory the maximum) over 1/{STRETCHES} of the "
        "run, or over the time between two samples if that is longer. A line has a gap where a host has no samples. GPUs and "
        "processors: all of the hosts. Dotted: the end of the first timed step."
    )
    if len(networks) > 4:  # one panel for the sum, one for loopback, two per interface: several interfaces
        caption += " Interfaces are distinguished by their names; the records do not say which is the control network."
    if left_out_count:
        caption += f" {left_out_count} more interfaces, which sent less, are not drawn."
    caption += played_note(played)
    height_px = 60 + min(22 * len(legend_labels), LEGEND_HEIGHT_PX) + PANEL_PX * len(panels)
    data += invisible_lines(data)
    return Figure("telemetry", "Telemetry", caption, height_px, data, stacked_layout([title for title, _ in panels]))


def _unresumed_run(mark: CellMark) -> LoadedRun | None:
    return next((run for run in mark.cell.completed if not run.resumed), None)


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
    title = f"{direction} on the network, {html.escape(name, quote=False)} (MB/s)"
    return TelemetryPanel(
        title,
        MB,
        "sum",
        lambda samples: rate_readings(select_network_samples(samples.nics).filter(pl.col("name") == name), counter),
    )


def _counter_panel(title: str, counter: str) -> TelemetryPanel:
    """A panel for a counter of bytes of the hosts. A run has no line if its counter did not grow."""
    has_grown = pl.col(counter).max().over("run") > pl.col(counter).min().over("run")
    return TelemetryPanel(title, MB, "sum", lambda samples: rate_readings(samples.hosts.filter(has_grown), counter, "host"))


def _pressure_panel(title: str, counter: str) -> TelemetryPanel:
    """A panel for a counter of the seconds in which a task waited. A run has no line if no task waited."""
    has_waited = pl.col(counter).max().over("run") > pl.col(counter).min().over("run")
    return TelemetryPanel(title, 0.01, "mean", lambda samples: rate_readings(samples.hosts.filter(has_waited), counter, "host"))


def _cell_trace(mark: CellMark, curve: Curve, number: int, visible: bool | str, in_legend: bool) -> dict[str, Any]:
    """The line of a cell in one panel. number: the number of the panel, from 1.

    in_legend: whether this line gets an entry in the legend. The entry then stands for the lines of the cell in all panels.
    """
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": mark.label,
        "meta": mark.row.id,
        "legendgroup": mark.label,
        "showlegend": in_legend,
        "x0": round(curve.first_s, 4),
        "dx": round(curve.width_s, 4),
        "y": curve.values,
        "yaxis": y_axis_name(number),
        "line": mark.look.line | {"width": 1.5},
        "marker": mark.look.marks(4) if len(curve.values) <= MAX_MARKED else mark.look.sparse_marks,
        "connectgaps": False,
        "visible": visible,
        "hovertemplate": "%{y:.4~g} at %{x:.1f} s",
    }


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
    TelemetryPanel("Processors busy (%)", 1, "mean", lambda samples: level_readings(samples.hosts, "host", "cpu_pct")),
    TelemetryPanel(
        "Busiest processor (%)", 1, "mean", lambda samples: level_readings(samples.hosts, "host", "busiest_core_pct")
    ),
    TelemetryPanel(
        "Memory of the hosts in use (GiB)",
        GIB,
        "mean",
        lambda samples: level_readings(samples.hosts, "host", "memory_used_bytes"),
    ),
    _pressure_panel("Tasks waiting for processors (% of time)", "cpu_pressure_s"),
    _pressure_panel("Tasks waiting for memory (% of time)", "memory_pressure_s"),
    _pressure_panel("Tasks waiting for disks and network storage (% of time)", "io_pressure_s"),
    _counter_panel("Read from disks (MB/s)", "disk_read_bytes"),
    _counter_panel("Written to disks (MB/s)", "disk_write_bytes"),
    _counter_panel("Received from NFS servers (MB/s)", "nfs_read_bytes"),
    _counter_panel("Sent to NFS servers (MB/s)", "nfs_write_bytes"),
)
