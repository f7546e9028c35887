"""Draws the bus bandwidth that each collective reaches, compared with the bandwidth of the link between the GPUs."""

from __future__ import annotations

import html
from typing import Any

from collect import notation
from collect.drawing.panel_rows import rows
from collect.drawing.stacked_bars import some
from collect.figure import INK, CellMark, Figure, Group, by_cell, by_cell_height
from collect.figures.collectives import KINDS
from collect.findings.trace_answers import GroupTraffic, of_cell

NAME = "bandwidth"
LEGEND_PX = 30
MARKER_PX, LINK_PX = 11, 18


def draw(group: Group) -> Figure | None:
    """Draw one row per cell, with one mark for each collective of each process group whose bandwidth is known."""
    shown, left_out = some(group, lambda mark: bool(known(mark)))
    if not shown.marks:
        return None
    found = [(mark, use) for mark in shown.marks for use in known(mark)]
    data = [
        _marks(kind, colour, [(mark, use) for mark, use in found if use.collective == kind])
        for kind, colour in KINDS.items()
        if any(use.collective == kind for _, use in found)
    ]
    links = {(mark.label, use.link_gb_per_s, use.link) for mark, use in found if use.link_gb_per_s is not None}
    if links:
        data.append(_links(sorted(links, key=str)))
    shape = by_cell(shown, "bus bandwidth in GB/s")
    shape["showlegend"] = True
    caption = (
        "A mark per collective and process group, over profiled ranks and repeats. Bus bandwidth as nccl-tests defines it: "
        "size of the message over the time of the transfer, times a factor of the collective, so that it compares with the "
        "bandwidth of a link. Without traces of all ranks the time includes waiting for slow ranks. The stroke: the link "
        f"between the GPUs of a host in one direction, by the data sheet.{left_out}"
    )
    return rows(Figure(NAME, "Bandwidth of collectives", caption, by_cell_height(shown) + LEGEND_PX, data, shape), shown.marks)


def known(mark: CellMark) -> list[GroupTraffic]:
    """The collectives of a cell whose bus bandwidth is known and whose kind has its own colour in figures."""
    return [use for use in of_cell(mark.cell) if use.bus_gb_per_s is not None and use.collective in KINDS]


def _marks(kind: str, colour: str, found: list[tuple[CellMark, GroupTraffic]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": [use.bus_gb_per_s for _, use in found],
        "y": [mark.label for mark, _ in found],
        "meta": [mark.row.id for mark, _ in found],
        "customdata": [[mark.label, html.escape(_says(use), quote=False)] for mark, use in found],
        "marker": {"color": colour, "size": MARKER_PX},
        "hovertemplate": f"{kind}: %{{x:,.4~g}} GB/s<br>%{{customdata[1]}}<extra>%{{customdata[0]}}</extra>",
    }


def _says(use: GroupTraffic) -> str:
    size = "" if use.message_bytes is None else f", {notation.number(use.message_bytes / notation.MIB, 3)} MiB each"
    return f"process group {use.group}: {notation.number(use.calls, 3)} calls per step{size}"


def _links(links: list[tuple[str, float | None, str | None]]) -> dict[str, Any]:
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
