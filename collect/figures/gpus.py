"""Draws the telemetry of each GPU, one panel per quantity, all with the same time axis, as in figures 11 to 19 of study 3.

A mean over GPUs would hide a single slow GPU.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import polars as pl

from collect.drawing.curves import STRETCHES, Curve, levels, rates, together
from collect.drawing.panels import PANEL_PX, invisible_lines, is_a_line, scaled, stacked, y_axis
from collect.figure import FEW, LEGEND_HEIGHT_PX, PLAYED, Figure, Group, played_note
from collect.loading.loaded_run import LoadedRun
from collect.metrics.utilization import memory_sizes
from collect.notation import GIB, MB
from collect.strategy_style import COLOURS, DASHES

MOST_LINES = 64  # the most GPUs that are drawn: nobody can follow more lines, and each GPU has a line in up to eleven panels
SHOWN_LINES = 16  # lines that are visible when the page opens: the GPUs of the first cells
UUID_SHOWN = 12  # the legend shows this many characters of a UUID, or more if the GPUs of a host would look alike


class GpuPanel(NamedTuple):
    """A panel of the figure, which shows one quantity of all GPUs."""

    title: str  # the quantity and its unit
    scale: float  # how many units of the column make one unit of the title, such as 2^30 bytes for GiB
    column: str  # the column of the GPU samples that the panel shows
    counter: bool = False  # whether the column is a counter: then the panel shows its growth per second


class GpuLine(NamedTuple):
    """A GPU on which the run of a cell trained. The figure has one line for this GPU in each panel."""

    label: str
    place: int  # the place of the GPU in its cell, from 0
    cell: int  # the place of its cell among the cells of the figure, from 0
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
    parts: list[pl.DataFrame] = []
    lines: dict[str, GpuLine] = {}
    played: list[str] = []  # labels of the cells whose GPU values a stub of NVML made up
    left_out = cells = 0
    for mark in group.marks:
        run = next((run for run in mark.cell.completed if not run.resumed), None)
        if run is None or run.window is None or run.shown_gpu_samples.is_empty():
            continue
        devices = sorted(run.shown_gpu_samples.select("host", "uuid").unique().rows())
        if len(lines) + len(devices) > MOST_LINES:
            left_out += len(devices)
            continue
        for place, ((host, _), uuid) in enumerate(zip(devices, _shown_uuids(devices), strict=True)):
            name = f"{mark.label}, {html.escape(f'{host} {uuid}', quote=False)}{PLAYED * run.plays_gpus}"
            lines[_key(cells, place)] = GpuLine(name, place, cells, mark.row.id)
        played += [mark.label] * run.plays_gpus
        parts.append(_rows(run, run.window[0], {device: _key(cells, place) for place, device in enumerate(devices)}))
        cells += 1
    if not parts:
        return None
    gpus = pl.concat(parts, rechunk=True)
    panels = [(f"{panel.title}{PLAYED * bool(played)}", curves) for panel in PANELS if (curves := _curves(gpus, panel))]
    if not panels:
        return None
    drawn = [key for key in lines if any(key in curves for _, curves in panels)]
    data: list[dict[str, Any]] = []
    for number, (_, curves) in enumerate(panels, 1):
        for order, key in enumerate(drawn):
            if key in curves:
                named = any(line["legendgroup"] == key for line in data)
                visible = True if order < SHOWN_LINES else "legendonly"
                data.append(
                    _line(lines[key], curves[key], number) | {"legendgroup": key, "showlegend": not named, "visible": visible}
                )
    caption = (
        "First completed repeat of each cell; one line per GPU that its ranks trained on. Each point is the mean over "
        f"1/{STRETCHES} of the run, or over the time between two samples if that is longer. A line has a gap where a GPU gave "
        "no value. Dotted: the end of the first timed step."
    )
    if left_out:
        caption += f" {left_out} more GPUs are not drawn."
    caption += played_note(played)
    height_px = 60 + min(22 * len(drawn), LEGEND_HEIGHT_PX) + PANEL_PX * len(panels)
    data += invisible_lines(data)
    return Figure("gpus", "Each GPU", caption, height_px, data, stacked([title for title, _ in panels]))


def _key(cell: int, place: int) -> str:
    return f"{cell} {place}"


def _rows(run: LoadedRun, zero_s: float, keys: dict[tuple[Any, ...], str]) -> pl.DataFrame:
    """The samples of the GPUs of a run. In the result, the column `run` is the key of a GPU's line.

    zero_s: the time from which wall_s counts in the result. keys: (host, uuid) of each GPU -> the key of its line.
    """
    devices = pl.DataFrame([(*device, key) for device, key in keys.items()], schema=["host", "uuid", "run"], orient="row")
    rows = run.shown_gpu_samples.join(devices, on=["host", "uuid"], maintain_order="left")
    sizes = memory_sizes(run.shown_gpu_samples, run.hosts)
    whole = pl.col("uuid").replace_strict(sizes, return_dtype=pl.Float64, default=None)
    return rows.with_columns(pl.col("wall_s") - zero_s, memory_pct=100 * pl.col("memory_used_bytes") / whole)


def _shown_uuids(devices: Sequence[tuple[str, str]]) -> list[str]:
    """The beginning of each UUID, for the legend: UUID_SHOWN characters, or as many more as the GPUs of a host need to differ.

    devices: (host, UUID) of each GPU.
    """
    longest = max(len(uuid) for _, uuid in devices)
    lengths = range(UUID_SHOWN, longest + 1)
    shown = next((n for n in lengths if len({(host, uuid[:n]) for host, uuid in devices}) == len(devices)), longest)
    return [uuid[:shown] for _, uuid in devices]


def _curves(gpus: pl.DataFrame, panel: GpuPanel) -> dict[str, Curve]:
    readings = rates(gpus, panel.column, "uuid") if panel.counter else levels(gpus, "uuid", panel.column)
    return {key: scaled(curve, panel.scale) for key, curve in together(readings, "mean").items() if is_a_line(curve)}


def _line(line: GpuLine, curve: Curve, number: int) -> dict[str, Any]:
    """The line of a GPU in one panel. GPUs of the same cell differ in colour, and cells differ in dash.

    number: the number of the panel, from 1.
    """
    colour = f"var(--series-{line.place % COLOURS + 1})"
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(curve.values) <= FEW else "lines",
        "name": line.label,
        "meta": line.cell_id,
        "x0": round(curve.first_s, 4),
        "dx": round(curve.width_s, 4),
        "y": curve.values,
        "yaxis": y_axis(number),
        "line": {"color": colour, "dash": DASHES[line.cell % len(DASHES)], "width": 1.5},
        "marker": {"color": colour, "size": 4},
        "connectgaps": False,
        "hovertemplate": "%{y:.4~g} at %{x:.1f} s",
    }
