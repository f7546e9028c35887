"""Draws the telemetry of the hosts during training, one panel per quantity, all with the same time axis, as in studies 1 and
3."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import polars as pl

from collect.drawing.curves import STRETCHES, Curve, Together, growth, levels, rates, together
from collect.drawing.panels import PANEL_PX, invisible_lines, is_a_line, scaled, stacked, y_axis
from collect.figure import FEW, LEGEND_HEIGHT_PX, PLAYED, CellMark, Figure, Group, played_note, shown_first
from collect.loading.loaded_run import LoadedRun
from collect.metrics.network import of_loopback, of_network
from collect.metrics.utilization import memory_shares
from collect.notation import GIB, MB
from collect.sources.steps import window

MOST_INTERFACES = 3  # the most network interfaces that have their own panels; the interfaces with the most traffic get them


class RunSamples(NamedTuple):
    """The samples of all runs that are drawn.

    In each frame, the column `run` contains the label of the cell, and wall_s counts from the first timed step of the run.
    """

    hosts: pl.DataFrame
    nics: pl.DataFrame
    gpus: pl.DataFrame
    shares: pl.DataFrame  # GPU memory in use, as a share of the whole memory of the GPU


class TelemetryPanel(NamedTuple):
    """A panel of the figure, which shows one quantity."""

    title: str  # the quantity and its unit
    scale: float  # how many units of the readings make one unit of the title, such as 2^30 bytes for GiB
    how: Together  # how the values of all devices are combined (`curves.together`)
    readings: Callable[[RunSamples], pl.DataFrame]  # makes the readings of the quantity from the samples (`curves.levels`)


def draw(group: Group) -> Figure | None:
    """Draw one line per cell in each panel, for the first completed repeat that did not resume from a checkpoint."""
    watched = [(mark, run, window(run.timed)) for mark in group.marks if (run := _run(mark)) is not None]
    spans = {mark.label: (run, span[0]) for mark, run, span in watched if span}
    if not spans:
        return None
    lines = shown_first([mark for mark, _, span in watched if span])
    seen = _seen(spans)
    networks, left_out = _networks(seen.nics)
    panels: list[tuple[str, dict[str, Curve]]] = []
    played = [label for label, (run, _) in spans.items() if run.plays_gpus]
    for panel in (*(GPU if len(seen.gpus) else ()), *networks, *HOST):
        curves = together(panel.readings(seen), panel.how)
        if shown := {label: scaled(curve, panel.scale) for label, curve in curves.items() if is_a_line(curve)}:
            is_played = panel in GPU and not shown.keys().isdisjoint(played)
            panels.append((f"{panel.title}{PLAYED * is_played}", shown))
    if not panels:
        return None
    named: set[str] = set()
    data: list[dict[str, Any]] = []
    for number, (_, curves) in enumerate(panels, 1):
        for mark, visible in lines:
            if mark.label in curves:
                data.append(_line(mark, curves[mark.label], number, visible, named=mark.label not in named))
                named.add(mark.label)
    caption = (
        f"First completed repeat of each cell. Each point is the mean (for GPU memory the maximum) over 1/{STRETCHES} of the "
        "run, or over the time between two samples if that is longer. A line has a gap where a host has no samples. GPUs and "
        "processors: all of the hosts. Dotted: the end of the first timed step."
    )
    if len(networks) > 4:  # one panel for the sum, one for loopback, two per interface: several interfaces
        caption += " Interfaces are distinguished by their names; the records do not say which is the control network."
    if left_out:
        caption += f" {left_out} more interfaces, which sent less, are not drawn."
    caption += played_note(played)
    height_px = 60 + min(22 * len(named), LEGEND_HEIGHT_PX) + PANEL_PX * len(panels)
    data += invisible_lines(data)
    return Figure("telemetry", "Telemetry", caption, height_px, data, stacked([title for title, _ in panels]))


def _run(mark: CellMark) -> LoadedRun | None:
    return next((run for run in mark.cell.completed if not run.resumed), None)


def _seen(spans: Mapping[str, tuple[LoadedRun, float]]) -> RunSamples:
    def every(of: Callable[[LoadedRun], pl.DataFrame]) -> pl.DataFrame:
        parts = (of(run).with_columns(pl.col("wall_s") - zero_s, run=pl.lit(label)) for label, (run, zero_s) in spans.items())
        return pl.concat(parts, rechunk=True)

    return RunSamples(
        every(lambda run: run.samples.hosts),
        every(lambda run: run.samples.nics),
        every(lambda run: run.samples.gpus),
        every(lambda run: memory_shares(run.samples.gpus, run.hosts)),
    )


def _networks(nics: pl.DataFrame) -> tuple[list[TelemetryPanel], int]:
    """(panels for network interfaces and loopback, number of interfaces without panels).

    The first panel has the bytes of all interfaces together, added up over time. Then each of the busiest interfaces has two
    panels, for sent and for received bytes. Interfaces without traffic have no panels. Loopback has one panel.
    """
    grown = [pl.max(counter) - pl.min(counter) for counter in ("tx_bytes", "rx_bytes")]
    counted = of_network(nics).group_by("run", "host", "name").agg(carried=pl.sum_horizontal(grown))
    carried = dict(counted.group_by("name").agg(pl.sum("carried")).iter_rows())
    names = [name for name in sorted(carried, key=lambda name: (-carried[name], name)) if carried[name]]
    ways = (("Sent", "tx_bytes"), ("Received", "rx_bytes"))
    panels = [_interface(name, says, counter) for name in names[:MOST_INTERFACES] for says, counter in ways]
    return [*([SENT_IN_ALL] if names else []), *panels, LOOPBACK], max(len(names) - MOST_INTERFACES, 0)


def _interface(name: str, says: str, counter: str) -> TelemetryPanel:
    title = f"{says} on the network, {html.escape(name, quote=False)} (MB/s)"
    return TelemetryPanel(title, MB, "sum", lambda seen: rates(of_network(seen.nics).filter(pl.col("name") == name), counter))


def _counter(title: str, counter: str) -> TelemetryPanel:
    """A panel for a counter of bytes of the hosts. A run has no line if its counter did not grow."""
    at_work = pl.col(counter).max().over("run") > pl.col(counter).min().over("run")
    return TelemetryPanel(title, MB, "sum", lambda seen: rates(seen.hosts.filter(at_work), counter, "host"))


def _pressure(title: str, counter: str) -> TelemetryPanel:
    """A panel for a counter of the seconds in which a task waited. A run has no line if no task waited."""
    waited = pl.col(counter).max().over("run") > pl.col(counter).min().over("run")
    return TelemetryPanel(title, 0.01, "mean", lambda seen: rates(seen.hosts.filter(waited), counter, "host"))


def _line(mark: CellMark, curve: Curve, number: int, visible: bool | str, named: bool) -> dict[str, Any]:
    """The line of a cell in one panel. number: the number of the panel, from 1.

    named: whether this line gets an entry in the legend. The entry then stands for the lines of the cell in all panels.
    """
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": mark.label,
        "meta": mark.row.id,
        "legendgroup": mark.label,
        "showlegend": named,
        "x0": round(curve.first_s, 4),
        "dx": round(curve.width_s, 4),
        "y": curve.values,
        "yaxis": y_axis(number),
        "line": mark.look.line | {"width": 1.5},
        "marker": mark.look.marks(4) if len(curve.values) <= FEW else mark.look.some_marks,
        "connectgaps": False,
        "visible": visible,
        "hovertemplate": "%{y:.4~g} at %{x:.1f} s",
    }


GPU = (
    TelemetryPanel("GPU memory in use (%)", 1, "max", lambda seen: levels(seen.shares, "uuid", "memory_pct")),
    TelemetryPanel("GPUs busy (%)", 1, "mean", lambda seen: levels(seen.gpus, "uuid", "utilization_pct")),
)
SENT_IN_ALL = TelemetryPanel(
    "All bytes sent on the network since the first timed step (MB)",
    MB,
    "sum",
    lambda seen: growth(of_network(seen.nics), "tx_bytes"),
)
LOOPBACK = TelemetryPanel(
    "Sent over loopback, within a host (MB/s)", MB, "sum", lambda seen: rates(of_loopback(seen.nics), "tx_bytes")
)
HOST = (
    TelemetryPanel("Processors busy (%)", 1, "mean", lambda seen: levels(seen.hosts, "host", "cpu_pct")),
    TelemetryPanel("Busiest processor (%)", 1, "mean", lambda seen: levels(seen.hosts, "host", "busiest_core_pct")),
    TelemetryPanel(
        "Memory of the hosts in use (GiB)", GIB, "mean", lambda seen: levels(seen.hosts, "host", "memory_used_bytes")
    ),
    _pressure("Tasks waiting for processors (% of time)", "cpu_pressure_s"),
    _pressure("Tasks waiting for memory (% of time)", "memory_pressure_s"),
    _pressure("Tasks waiting for disks and network storage (% of time)", "io_pressure_s"),
    _counter("Read from disks (MB/s)", "disk_read_bytes"),
    _counter("Written to disks (MB/s)", "disk_write_bytes"),
    _counter("Received from NFS servers (MB/s)", "nfs_read_bytes"),
    _counter("Sent to NFS servers (MB/s)", "nfs_write_bytes"),
)
