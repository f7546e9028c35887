"""What the hosts did while they trained, one panel per quantity, all over the same clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from collect.figure import MOST_SHOWN, MUTED, Figure, Group, axis, layout, thin
from collect.notation import GIB, MIB
from collect.sources.samples import Samples
from collect.sources.steps import window

PANEL_PX = 170
GAP = 0.22  # of a panel, for its title
Curve = Callable[[Samples], pl.DataFrame]  # samples -> wall_s, value: mean or sum over hosts


def draw(group: Group) -> Figure | None:
    """One line per cell and panel, of the first completed repeat; 0 s is the end of the first timed step."""
    spans = {mark.label: window(mark.cell.completed[0].timed) for mark in group.marks if mark.cell.completed}
    watched = [(mark, mark.cell.completed[0].samples, span[0]) for mark in group.marks if (span := spans.get(mark.label))]
    panels = [(title, curve) for title, curve in PANELS if any(curve(samples).height for _, samples, _ in watched)]
    data: list[dict[str, Any]] = []
    for number, (_, curve) in enumerate(panels, 1):
        for index, (mark, samples, start) in enumerate(watched):
            rows = curve(samples).sort("wall_s")
            x, y = thin((rows["wall_s"] - start).to_list(), rows["value"].to_list())
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": mark.label,
                    "legendgroup": mark.label,
                    "showlegend": number == 1,
                    "x": x,
                    "y": y,
                    "yaxis": _y(number),
                    "line": {"color": mark.look.colour, "dash": mark.look.dash, "width": 1.5},
                    "visible": True if index < MOST_SHOWN else "legendonly",
                    "hovertemplate": "%{y:.4~g} at %{x:.1f} s",
                }
            )
    if not data:
        return None
    caption = "The first completed repeat of each cell, over all its hosts. Dotted: the end of the first timed step."
    return Figure("telemetry", "Telemetry", caption, 92 + PANEL_PX * len(panels), data, _stacked([t for t, _ in panels]))


def _stacked(titles: list[str]) -> dict[str, Any]:
    """A layout with one panel below the other over one clock, each with its title above its left edge."""
    x = axis("s since the end of the first timed step", anchor=_y(len(titles)), showgrid=False)
    shape = layout(x, {}, showlegend=True)
    shape["annotations"] = []
    start = {"type": "line", "xref": "x", "yref": "paper", "x0": 0, "x1": 0, "y0": 0, "y1": 1}
    shape["shapes"] = [start | {"line": {"color": MUTED, "width": 1, "dash": "dot"}}]
    for number, title in enumerate(titles, 1):
        top, bottom = 1 - (number - 1 + GAP) / len(titles), 1 - number / len(titles)
        panel = axis("", domain=[bottom, top], rangemode="tozero", nticks=4, tickformat=",.3~r", anchor="x")
        shape[_y(number).replace("y", "yaxis")] = panel
        at = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
        shape["annotations"].append(at | {"text": title, "showarrow": False, "font": {"size": 12, "color": MUTED}})
    return shape


def _y(number: int) -> str:
    """What plotly calls the number-th y axis."""
    return "y" if number == 1 else f"y{number}"


def _mean(column: str, scale: float = 1) -> Curve:
    def curve(samples: Samples) -> pl.DataFrame:
        rows = samples.hosts.drop_nulls(column)
        return rows.group_by("wall_s").agg(value=pl.col(column).mean() / scale)

    return curve


def _gpu(samples: Samples) -> pl.DataFrame:
    return samples.gpus.drop_nulls("utilization_pct").group_by("wall_s").agg(value=pl.col("utilization_pct").mean())


def _rate(kinds: tuple[str, ...]) -> Curve:
    """MiB sent per second between a sample and the one before; a counter that went backwards gives no point."""

    def curve(samples: Samples) -> pl.DataFrame:
        rows = samples.nics.filter(pl.col("kind").is_in(kinds)).drop_nulls("tx_bytes").sort("wall_s")
        each = rows.with_columns(
            sent=pl.col("tx_bytes").diff().over("host", "name"), passed=pl.col("wall_s").diff().over("host", "name")
        ).filter(pl.col("sent") >= 0, pl.col("passed") > 0)
        return each.group_by("wall_s").agg(value=(pl.col("sent") / pl.col("passed")).sum() / MIB)

    return curve


PANELS: tuple[tuple[str, Curve], ...] = (
    ("Processors busy (%)", _mean("cpu_pct")),
    ("Memory used (GiB)", _mean("memory_used_bytes", GIB)),
    ("Sent on the network (MiB/s)", _rate(("physical", "virtual"))),
    ("Sent over loopback (MiB/s)", _rate(("loopback",))),
    ("GPUs busy (%)", _gpu),
)
