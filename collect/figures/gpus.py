"""Draws the telemetry of each GPU, one panel per quantity, all with the same time axis, as in figures 11 to 19 of study 3.

A mean over GPUs would hide a single slow GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from collect.drawing.curves import STRETCHES, join_devices, level_readings, rate_readings
from collect.drawing.panels import curve_trace, draw_panels, is_a_line, scale_curve
from collect.figure import MAX_MARKED, PLAYED, SERIES, Figure, Group, count_left_out, escape, played_note
from collect.loading.loaded_run import LoadedRun
from collect.metrics.utilization import find_memory_sizes
from collect.notation import GIB, MB
from collect.strategy_style import COLOURS, DASHES

MOST_LINES = 64  # the most GPUs that are drawn: nobody can follow more lines, and each GPU has a line in up to eleven panels
SHOWN_LINES = 16  # lines that are visible when the page opens: the GPUs of the first cells
UUID_CHARS = 12  # the legend shows this many characters of a UUID, or more if the GPUs of a host would look alike


class GpuPanel(NamedTuple):
    """A panel of the figure, which shows one quantity of all GPUs."""

    title: str
    """The quantity and its unit."""
    scale: float
    """How many units of the column make one unit of the title, such as 2^30 bytes for GiB."""
    column: str
    """The column of the GPU samples that the panel shows."""
    counter: bool = False
    """Whether the column is a counter: then the panel shows its growth per second."""


class GpuLine(NamedTuple):
    """A GPU on which the run of a cell trained. The figure has one line for this GPU in each panel."""

    label: str
    gpu_index: int
    """The place of the GPU in its cell, from 0."""
    cell: int
    """The place of its cell among the cells of the figure, from 0."""
    cell_id: str


PANELS = (
    GpuPanel("GPU busy (%)", 1, "utilization_pct"),
    GpuPanel("Memory in use (GiB)", GIB, "memory_used_bytes"),
    GpuPanel("Memory in use (%)", 1, "memory_pct"),
    GpuPanel("Power (W)", 1, "power_w"),
    GpuPanel("Temperature (°C)", 1, "temperature_c"),
    GpuPanel("SM clock (MHz)", 1, "sm_clock_mhz"),
    GpuPanel("Memory clock (MHz)", 1, "memory_clock_mhz"),
    GpuPanel("Sent over PCIe (MB/s)", MB, "pcie_tx_bytes", counter=True),
    GpuPanel("Received over PCIe (MB/s)", MB, "pcie_rx_bytes", counter=True),
    GpuPanel("Sent over NVLink (MB/s)", MB, "nvlink_tx_bytes", counter=True),
    GpuPanel("Received over NVLink (MB/s)", MB, "nvlink_rx_bytes", counter=True),
)


def draw(group: Group) -> Figure | None:
    """Draw one line per GPU in each panel, for the first completed repeat of each cell that did not resume from a
    checkpoint."""
    frames: list[pl.DataFrame] = []
    lines: dict[str, GpuLine] = {}
    played: list[str] = []  # labels of the cells whose GPU values a stub of NVML made up
    left_out_count = cells = 0
    for mark in group.marks:
        run = mark.unresumed_run
        if run is None or run.window is None or run.shown_gpu_samples.is_empty():
            continue
        devices = sorted(run.shown_gpu_samples.select("host", "uuid").unique().rows())
        if len(lines) + len(devices) > MOST_LINES:
            left_out_count += len(devices)
            continue
        for index, ((host, _), uuid) in enumerate(zip(devices, _short_uuids(devices), strict=True)):
            name = f"{mark.label}, {escape(f'{host} {uuid}')}{PLAYED * run.plays_gpus}"
            lines[_line_key(cells, index)] = GpuLine(name, index, cells, mark.row.id)
        played += [mark.label] * run.plays_gpus
        frames.append(_gpu_rows(run, run.window[0], {device: _line_key(cells, index) for index, device in enumerate(devices)}))
        cells += 1
    if not frames:
        return None
    gpus = pl.concat(frames, rechunk=True)
    panels = [
        (f"{panel.title}{PLAYED * bool(played)}", traces) for panel in PANELS if (traces := _panel_traces(gpus, panel, lines))
    ]
    if not panels:
        return None
    drawn_keys = [key for key in lines if any(key in traces for _, traces in panels)]
    looks = {
        key: _gpu_look(lines[key]) | {"visible": True if index < SHOWN_LINES else "legendonly"}
        for index, key in enumerate(drawn_keys)
    }
    caption = (
        "First completed repeat of each cell; one line per GPU that its ranks trained on. Each point is the mean over "
        f"1/{STRETCHES} of the run, or over the time between two samples if that is longer. A line has a gap where a GPU gave "
        "no value. Dotted: the end of the first timed step."
    )
    caption += count_left_out(left_out_count, "GPUs") + played_note(played)
    return draw_panels("gpus", "Each GPU", caption, panels, looks)


def _line_key(cell_index: int, gpu_index: int) -> str:
    return f"{cell_index} {gpu_index}"


def _gpu_rows(run: LoadedRun, zero_s: float, keys: dict[tuple[Any, ...], str]) -> pl.DataFrame:
    """The samples of the GPUs of a run. In the result, the column `run` is the key of a GPU's line.

    zero_s: the time from which wall_s counts in the result. keys: (host, uuid) of each GPU -> the key of its line.
    """
    devices = pl.DataFrame([(*device, key) for device, key in keys.items()], schema=["host", "uuid", "run"], orient="row")
    rows = run.shown_gpu_samples.join(devices, on=["host", "uuid"], maintain_order="left")
    sizes = find_memory_sizes(run.shown_gpu_samples, run.hosts)
    total_bytes = pl.col("uuid").replace_strict(sizes, return_dtype=pl.Float64, default=None)
    return rows.with_columns(pl.col("wall_s") - zero_s, memory_pct=100 * pl.col("memory_used_bytes") / total_bytes)


def _short_uuids(devices: Sequence[tuple[str, str]]) -> list[str]:
    """The beginning of each UUID, for the legend: UUID_CHARS characters, or as many more as the GPUs of a host need to differ.

    devices: (host, UUID) of each GPU.
    """
    longest = max(len(uuid) for _, uuid in devices)
    lengths = range(UUID_CHARS, longest + 1)
    length = next((n for n in lengths if len({(host, uuid[:n]) for host, uuid in devices}) == len(devices)), longest)
    return [uuid[:length] for _, uuid in devices]


def _panel_traces(gpus: pl.DataFrame, panel: GpuPanel, lines: Mapping[str, GpuLine]) -> dict[str, dict[str, Any]]:
    """The lines of a panel, by their keys in `lines`."""
    readings = rate_readings(gpus, panel.column, "uuid") if panel.counter else level_readings(gpus, "uuid", panel.column)
    traces = {}
    for key, curve in join_devices(readings, "mean").items():
        if is_a_line(curve):
            mode = "lines+markers" if len(curve.values) <= MAX_MARKED else "lines"
            marker = {"color": _gpu_colour(lines[key]), "size": 4}
            traces[key] = curve_trace(scale_curve(curve, panel.scale), mode, marker)
    return traces


def _gpu_colour(line: GpuLine) -> str:
    return SERIES[line.gpu_index % COLOURS + 1]


def _gpu_look(line: GpuLine) -> dict[str, Any]:
    """What the lines of a GPU have in common. GPUs of the same cell differ in colour, and cells differ in dash."""
    dash = DASHES[line.cell % len(DASHES)]
    return {"name": line.label, "meta": line.cell_id, "line": {"color": _gpu_colour(line), "dash": dash, "width": 1.5}}
