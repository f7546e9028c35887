"""Draws one run from its start to its end, with the times of all hosts on one corrected clock.

The steps and instruments of every rank are on top; below them are the processors, GPUs and network of every host. The reader
can zoom the time axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collect.drawing.axes import axis, axis_name, layout
from collect.drawing.panels import PANEL_PX, add_panel
from collect.drawing.traces import add_cell_id, scatter, span_bars, thin_points
from collect.figure import MUTED, PLAYED, SERIES, Figure, Group, escape, played_note
from collect.timeline import timeline
from collect.timeline.timeline import CounterTrack, RunTimeline, Spans

ROW_PX, HEAD_PX = 20, 30
MOST_RANKS = 16  # the most ranks that are drawn, starting with rank 0
MOST_BARS = 250  # about the most bars of a rank: if it has more steps, a bar stands for several consecutive steps
MOST_LINES = 16  # the most lines of a panel
KINDS = {"steps": SERIES[1], "warm-up steps": MUTED, "steps with an instrument": SERIES[5]} | {
    "instruments between steps": SERIES[4],
}  # kind of a bar -> its colour
PANELS = (  # (title of a panel, how the names of the counters that the panel shows end)
    ("Processors busy (%)", "processors busy"),
    ("GPU busy (%)", "utilization"),
    ("Sent (MB/s)", " sent"),
    ("Received (MB/s)", " received"),
)


class Bar(NamedTuple):
    """A bar in the row of a rank: one step, steps in a row, or an act of an instrument, such as saving a checkpoint."""

    kind: str
    """A key of KINDS."""
    start_s: float
    """Seconds since the first step began."""
    took_s: float
    """The length in seconds."""
    text: str
    """Says what the bar is."""


def draw(group: Group) -> Figure | None:
    """Draw one run: a completed repeat that did not resume from a checkpoint.

    Of the cells with such a repeat, the cell with the most ranks is chosen, and its first such repeat is drawn. None if no cell
    has such a repeat, or if the run has only one rank and no telemetry.
    """
    mark_runs = [(mark, run) for mark in group.marks if (run := mark.unresumed_run) is not None]
    if not mark_runs:
        return None
    mark, run = max(mark_runs, key=lambda pair: pair[1].cell.gpus)
    run_timeline = timeline.build_timeline(run)
    if not run_timeline.steps:
        return None
    zero_s = min(float(spans.start_s[0]) for spans in run_timeline.steps)
    bars = {spans.row: _step_bars(spans, zero_s) for spans in run_timeline.steps[:MOST_RANKS]}
    for spans in run_timeline.instruments:
        row = spans.row.removesuffix(" instruments")
        if row in bars:
            bars[row] += _instrument_bars(spans, zero_s)
    panels = [(title, lines) for title, end in PANELS if (lines := _panel_counters(run_timeline, end))]
    if not panels and len(bars) < 2:
        return None
    curves = (line for number, (_, lines) in enumerate(panels, 2) for line in _counter_traces(lines, number, zero_s))
    data = [*_bar_traces(bars), *curves]
    caption = (
        f"{mark.label}: its first completed repeat, all hosts on the clock of rank 0's host. Where steps are many, a bar "
        "has several of them. Drag along the axis to zoom in, double-click to see all. `collect timeline RUN --perfetto FILE` "
        "has every step of any run, and the profiled operators."
    )
    if run_timeline.uncorrected:
        caption += f" Not compared with the other clocks: {', '.join(escape(host) for host in run_timeline.uncorrected)}."
    caption += played_note([mark.label] * run.plays_gpus)
    titles = [f"{title}{PLAYED * (run.plays_gpus and title.startswith('GPU'))}" for title, _ in panels]
    rows_px = HEAD_PX + ROW_PX * len(bars)
    height_px = 110 + rows_px + PANEL_PX * len(panels)
    frame = _layout(list(bars), titles, rows_px)
    return Figure("run_timeline", "One run on one clock", caption, height_px, add_cell_id(mark, data), frame)


def _step_bars(spans: Spans, zero_s: float) -> list[Bar]:
    """The bars of the steps of one rank. If the rank has more than MOST_BARS steps, consecutive steps of the same kind are
    merged.

    zero_s: the time of the corrected clock at which the time axis starts.
    """
    steps_per_bar = -(-len(spans.names) // MOST_BARS)
    bars: list[Bar] = []
    merged_count = 0  # number of steps in the last bar
    for name, start_s, end_s in zip(spans.names, spans.start_s.tolist(), spans.end_s.tolist(), strict=True):
        kind = "warm-up steps" if name.startswith("warm-up") else "steps with an instrument" if name.endswith(")") else "steps"
        if bars and bars[-1].kind == kind and 0 < merged_count < steps_per_bar:
            first = bars[-1]
            text = f"{first.text.partition(' to ')[0]} to {name}"
            bars[-1], merged_count = first._replace(took_s=end_s - zero_s - first.start_s, text=text), merged_count + 1
        else:
            bars.append(Bar(kind, start_s - zero_s, end_s - start_s, name))
            merged_count = 1
    return bars


def _instrument_bars(spans: Spans, zero_s: float) -> list[Bar]:
    pairs = zip(spans.names, spans.start_s.tolist(), spans.end_s.tolist(), strict=True)
    return [Bar("instruments between steps", start_s - zero_s, end_s - start_s, name) for name, start_s, end_s in pairs]


def _panel_counters(run_timeline: RunTimeline, suffix: str) -> list[CounterTrack]:
    """The counters that a panel shows: at most MOST_LINES, those with the highest values, without counters that are always 0.

    suffix: how the names of the counters of this panel end.
    """
    matching = [
        counter
        for counter in run_timeline.counters
        if counter.name.endswith(suffix) and len(counter.values) > 1 and np.any(counter.values > 0)
    ]
    highest = sorted(matching, key=lambda counter: -float(np.max(counter.values)))[:MOST_LINES]
    return [counter for counter in matching if any(counter is other for other in highest)]


def _bar_traces(rows: dict[str, list[Bar]]) -> list[dict[str, Any]]:
    traces = []
    for kind, colour in KINDS.items():
        drawn = [(row, bar) for row, bars in rows.items() for bar in bars if bar.kind == kind]
        if drawn:
            spans = [(row, round(bar.start_s, 4), round(bar.took_s, 4)) for row, bar in drawn]
            texts = {"text": [escape(bar.text) for _, bar in drawn], "textposition": "none"}
            traces.append(span_bars(spans, kind, colour, "%{text}: %{x:.4~g} s", **texts))
    return traces


def _counter_traces(lines: Sequence[CounterTrack], number: int, zero_s: float) -> list[dict[str, Any]]:
    traces = []
    for index, line in enumerate(lines):
        x, y = thin_points((line.at_s - zero_s).tolist(), line.values.tolist())
        x = [round(second, 3) for second in x]
        y = [None if value is None else float(f"{value:.4g}") for value in y]
        look = {"line": {"color": SERIES[index % len(SERIES) + 1], "width": 1.2}, "showlegend": False}
        place = {"yaxis": axis_name("y", number), "hovertemplate": "%{y:.4~g} at %{x:.2f} s"}
        traces.append(scatter("lines", x, y, name=escape(f"{line.host} {line.name}"), **look, **place))
    return traces


def _layout(rows: list[str], titles: list[str], rows_px: int) -> dict[str, Any]:
    """The layout of the figure: the rows of the ranks on top, and below them one panel per title, all with the same time
    axis."""
    total_px = rows_px + PANEL_PX * len(titles)
    bottom = 1 - rows_px / total_px
    x = axis("s since the first step began", anchor=axis_name("y", 1 + len(titles)), showgrid=False, fixedrange=False)
    ranks = axis("", type="category", categoryorder="array", categoryarray=rows[::-1], showgrid=False)
    ranks |= {"domain": [bottom, 1.0], "anchor": "x"}
    frame = layout(x, ranks, showlegend=True, barmode="overlay", bargap=0.15, dragmode="zoom", annotations=[])
    for index, title in enumerate(titles):
        top = bottom - index * PANEL_PX / total_px - HEAD_PX / total_px
        add_panel(frame, index + 2, title, max(bottom - (index + 1) * PANEL_PX / total_px, 0.0), top)
    return frame
