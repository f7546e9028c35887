"""Draws the bus bandwidth that each collective reaches, compared with the bandwidth of the link between the GPUs."""

from __future__ import annotations

import html
from typing import Any

from collect import notation
from collect.drawing.panel_rows import rows
from collect.drawing.stacked_bars import select_cells
from collect.figure import INK, CellMark, Figure, Group, rows_height_px, rows_layout
from collect.figures.collectives import KINDS
from collect.findings.trace_answers import GroupTraffic, cell_traffic

NAME = "bandwidth"
LEGEND_PX = 30
MARKER_PX, LINK_PX = 11, 18


def draw(group: Group) -> Figure | None:
    """Draw one row per cell, with one mark for each collective of each process group whose bandwidth is known."""
    drawn, left_out_note = select_cells(group, lambda mark: bool(measured_collectives(mark)))
    if not drawn.marks:
        return None
    mark_uses = [(mark, use) for mark in drawn.marks for use in measured_collectives(mark)]
    data = [
        _mark_trace(kind, colour, [(mark, use) for mark, use in mark_uses if use.collective == kind])
        for kind, colour in KINDS.items()
        if any(use.collective == kind for _, use in mark_uses)
    ]
    links = {(mark.label, use.link_gb_per_s, use.link) for mark, use in mark_uses if use.link_gb_per_s is not None}
    if links:
        data.append(_link_trace(sorted(links, key=str)))
    frame = rows_layout(drawn, "bus bandwidth in GB/s")
    frame["showlegend"] = True
    caption = (
        "A mark per collective and process group, over profiled ranks and repeats. Bus bandwidth as nccl-tests defines it: "
        "size of the message over the time of the transfer, times a factor of the collective, so that it compares with the "
        "bandwidth of a link. Without traces of all ranks the time includes waiting for slow ranks. The stroke: the link "
        f"between the GPUs of a host in one direction, by the data sheet.{left_out_note}"
    )
    return rows(Figure(NAME, "Bandwidth of collectives", caption, rows_height_px(drawn) + LEGEND_PX, data, frame), drawn.marks)


def measured_collectives(mark: CellMark) -> list[GroupTraffic]:
    """The collectives of a cell whose bus bandwidth is known and whose kind has its own colour in figures."""
    return [use for use in cell_traffic(mark.cell) if use.bus_gb_per_s is not None and use.collective in KINDS]


def _mark_trace(kind: str, colour: str, mark_uses: list[tuple[CellMark, GroupTraffic]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": [use.bus_gb_per_s for _, use in mark_uses],
        "y": [mark.label for mark, _ in mark_uses],
        "meta": [mark.row.id for mark, _ in mark_uses],
        "customdata": [[mark.label, html.escape(_hover_text(use), quote=False)] for mark, use in mark_uses],
        "marker": {"color": colour, "size": MARKER_PX},
        "hovertemplate": f"{kind}: %{{x:,.4~g}} GB/s<br>%{{customdata[1]}}<extra>%{{customdata[0]}}</extra>",
    }


def _hover_text(use: GroupTraffic) -> str:
    size = "" if use.message_bytes is None else f", {notation.format_number(use.message_bytes / notation.MIB, 3)} MiB each"
    return f"process group {use.group}: {notation.format_number(use.calls, 3)} calls per step{size}"


def _link_trace(links: list[tuple[str, float | None, str | None]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "link",
        "x": [speed for _, speed, _ in links],
        "y": [label for label, _, _ in links],
        "customdata": [name for _, _, name in links],
        "marker": {"symbol": "line-ns", "size": LINK_PX, "line": {"color": INK, "width": 2.5}, "color": INK},
        "hovertemplate": "%{customdata}: %{x:,.4~g} GB/s in one direction<extra>%{y}</extra>",
    }
