"""Draws one run from its start to its end, with the times of all hosts on one corrected clock.

The steps and instruments of every rank are on top; below them are the processors, GPUs and network of every host. The reader
can zoom the time axis.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collect.drawing.panels import PANEL_PX, y_axis
from collect.figure import MUTED, PLAYED, CellMark, Figure, Group, axis, layout, of_cell, played_note, thin
from collect.loading.loaded_run import LoadedRun
from collect.strategy_style import COLOURS as SERIES
from collect.timeline import timeline
from collect.timeline.timeline import Counter, RunTimeline, Spans

ROW_PX, HEAD_PX = 20, 30
MOST_RANKS = 16  # the most ranks that are drawn, starting with rank 0
MOST_BARS = 250  # about the most bars of a rank: if it has more steps, a bar stands for several consecutive steps
MOST_LINES = 16  # the most lines of a panel
KINDS = {
    "steps": "var(--series-1)",
    "warm-up steps": MUTED,
    "steps with an instrument": "var(--series-5)",
    "instruments between steps": "var(--series-4)",
}
PANELS = (  # (title of a panel, how the names of the counters that the panel shows end)
    ("Processors busy (%)", "processors busy"),
    ("GPU busy (%)", "utilization"),
    ("Sent (MB/s)", " sent"),
    ("Received (MB/s)", " received"),
)


class Bar(NamedTuple):
    """A bar in the row of a rank: one step, several consecutive steps, or what an instrument did, such as saving a checkpoint.

    kind: a key of KINDS. start_s: seconds since the first step began. took_s: the length in seconds. text: says what the bar
    is.
    """

    kind: str
    start_s: float
    took_s: float
    text: str


def draw(group: Group) -> Figure | None:
    """Draw one run: a completed repeat that did not resume from a checkpoint.

    Of the cells with such a repeat, the cell with the most ranks is chosen, and its first such repeat is drawn. None if no cell
    has such a repeat, or if the run has only one rank and no telemetry.
    """
    found = [(mark, run) for mark in group.marks if (run := _run(mark)) is not None]
    if not found:
        return None
    mark, run = max(found, key=lambda pair: pair[1].cell.gpus)
    told = timeline.of_run(run)
    if not told.steps:
        return None
    zero_s = min(float(spans.start_s[0]) for spans in told.steps)
    bars = {spans.row: _steps(spans, zero_s) for spans in told.steps[:MOST_RANKS]}
    for spans in told.instruments:
        row = spans.row.removesuffix(" instruments")
        if row in bars:
            bars[row] += _acts(spans, zero_s)
    panels = [(title, lines) for title, end in PANELS if (lines := _lines(told, end))]
    if not panels and len(bars) < 2:
        return None
    data = [*_bars(bars), *(line for number, (_, lines) in enumerate(panels, 2) for line in _curves(lines, number, zero_s))]
    caption = (
        f"{mark.label}: its first completed repeat, all hosts on the clock of rank 0's host. Where steps are many, a bar "
        "has several of them. Drag along the axis to zoom in, double-click to see all. `collect timeline RUN --perfetto FILE` "
        "has every step of any run, and the profiled operators."
    )
    if told.uncorrected:
        caption += f" Not compared with the other clocks: {', '.join(_escaped(host) for host in told.uncorrected)}."
    caption += played_note([mark.label] * run.plays_gpus)
    titles = [f"{title}{PLAYED * (run.plays_gpus and title.startswith('GPU'))}" for title, _ in panels]
    rows_px = HEAD_PX + ROW_PX * len(bars)
    height_px = 110 + rows_px + PANEL_PX * len(panels)
    return Figure(
        "run_timeline", "One run on one clock", caption, height_px, of_cell(mark, data), _layout(list(bars), titles, rows_px)
    )


def _run(mark: CellMark) -> LoadedRun | None:
    return next((run for run in mark.cell.completed if not run.resumed), None)


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)


def _steps(spans: Spans, zero_s: float) -> list[Bar]:
    """The bars of the steps of one rank. If the rank has more than MOST_BARS steps, consecutive steps of the same kind are
    merged.

    zero_s: the time of the corrected clock at which the time axis starts.
    """
    at_once = -(-len(spans.names) // MOST_BARS)
    bars: list[Bar] = []
    merged = 0  # number of steps in the last bar
    for name, start_s, end_s in zip(spans.names, spans.start_s.tolist(), spans.end_s.tolist(), strict=True):
        kind = "warm-up steps" if name.startswith("warm-up") else "steps with an instrument" if name.endswith(")") else "steps"
        if bars and bars[-1].kind == kind and 0 < merged < at_once:
            first = bars[-1]
            text = f"{first.text.partition(' to ')[0]} to {name}"
            bars[-1], merged = first._replace(took_s=end_s - zero_s - first.start_s, text=text), merged + 1
        else:
            bars.append(Bar(kind, start_s - zero_s, end_s - start_s, name))
            merged = 1
    return bars


def _acts(spans: Spans, zero_s: float) -> list[Bar]:
    pairs = zip(spans.names, spans.start_s.tolist(), spans.end_s.tolist(), strict=True)
    return [Bar("instruments between steps", start_s - zero_s, end_s - start_s, name) for name, start_s, end_s in pairs]


def _lines(told: RunTimeline, end: str) -> list[Counter]:
    """The counters that a panel shows: at most MOST_LINES, those with the highest values, without counters that are always 0.

    end: how the names of the counters of this panel end.
    """
    found = [one for one in told.counters if one.name.endswith(end) and len(one.values) > 1 and np.any(one.values > 0)]
    kept = sorted(found, key=lambda one: -float(np.max(one.values)))[:MOST_LINES]
    return [one for one in found if any(one is other for other in kept)]


def _bars(rows: dict[str, list[Bar]]) -> list[dict[str, Any]]:
    data = []
    for kind, colour in KINDS.items():
        drawn = [(row, bar) for row, bars in rows.items() for bar in bars if bar.kind == kind]
        if drawn:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": kind,
                    "marker": {"color": colour, "line": {"width": 0}},
                    "base": [round(bar.start_s, 4) for _, bar in drawn],
                    "x": [round(bar.took_s, 4) for _, bar in drawn],
                    "y": [row for row, _ in drawn],
                    "text": [_escaped(bar.text) for _, bar in drawn],
                    "textposition": "none",
                    "hovertemplate": "%{text}: %{x:.4~g} s",
                }
            )
    return data


def _curves(lines: Sequence[Counter], number: int, zero_s: float) -> list[dict[str, Any]]:
    data = []
    for place, line in enumerate(lines):
        x, y = thin((line.at_s - zero_s).tolist(), line.values.tolist())
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": _escaped(f"{line.host} {line.name}"),
                "showlegend": False,
                "x": [round(at, 3) for at in x],
                "y": [None if value is None else float(f"{value:.4g}") for value in y],
                "yaxis": y_axis(number),
                "line": {"color": f"var(--series-{place % SERIES + 1})", "width": 1.2},
                "hovertemplate": "%{y:.4~g} at %{x:.2f} s",
            }
        )
    return data


def _layout(rows: list[str], titles: list[str], rows_px: int) -> dict[str, Any]:
    """The layout of the figure: the rows of the ranks on top, and below them one panel per title, all with the same time
    axis."""
    whole = rows_px + PANEL_PX * len(titles)
    bottom = 1 - rows_px / whole
    x = axis("s since the first step began", anchor=y_axis(1 + len(titles)), showgrid=False, fixedrange=False)
    ranks = axis("", type="category", categoryorder="array", categoryarray=rows[::-1], showgrid=False)
    shape = layout(x, ranks | {"domain": [bottom, 1.0], "anchor": "x"}, showlegend=True, barmode="overlay", bargap=0.15)
    shape["dragmode"], shape["annotations"] = "zoom", []
    for place, title in enumerate(titles):
        top = bottom - place * PANEL_PX / whole - HEAD_PX / whole
        low = bottom - (place + 1) * PANEL_PX / whole
        panel = axis("", domain=[max(low, 0.0), top], rangemode="tozero", nticks=4, tickformat=",.3~r", anchor="x")
        shape[y_axis(place + 2).replace("y", "yaxis")] = panel
        at = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
        shape["annotations"].append(at | {"text": title, "showarrow": False, "font": {"size": 12, "color": MUTED}})
    return shape
