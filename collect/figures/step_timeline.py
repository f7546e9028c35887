"""Draws the steps of all ranks on one clock, with the phases of each step: they show which rank is late, and where others wait.

The reader can zoom the time axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from collect.drawing.axes import axis, axis_name, layout, panel_title
from collect.drawing.traces import span_bars
from collect.figure import MUTED, SERIES, CellMark, Figure, Group, count_left_out, escape
from collect.loading.loaded_run import LoadedRun
from collect.timeline import timeline
from collect.timeline.straggler import PHASES, Straggler
from collect.timeline.timeline import Spans
from shardlab.runs import instrument_span
from shardlab.runs.instrument_span import InstrumentAct

ROW_PX, HEAD_PX = 22, 44  # height of a rank's row; height of a panel's title with the distance to the next panel
MOST_PANELS = 6
MOST_RANKS = 16  # the most ranks of a panel, starting with rank 0
MOST_STEPS = 10  # the most steps that are drawn, from the middle of the timed steps
INSTRUMENT = "instrument"  # name of the bars that show what an instrument did between steps, such as saving a checkpoint
COLOURS = {
    "data": SERIES[5],
    "forward": SERIES[1],
    "backward": SERIES[2],
    "optimizer": SERIES[3],
    "other": MUTED,
    INSTRUMENT: SERIES[4],
}


class StepPhase(NamedTuple):
    """A phase of a step of one rank, or what an instrument did between two steps, such as saving a checkpoint."""

    rank: int
    phase: str
    step: str
    """The name of the step, or what the instrument did."""
    start_ms: float
    """Ms since the first drawn step began."""
    took_ms: float
    """Duration of the phase in ms."""


class Panel(NamedTuple):
    """The panel that shows the steps of one cell."""

    mark: CellMark
    phases: list[StepPhase]
    """The phases of all drawn steps."""
    ranks: list[int]
    """The drawn ranks, in order."""
    straggler: Straggler | None
    """The rank that the others wait for; None: no such rank was found."""
    late_host: str
    """The host of this rank; "" if there is no such rank."""


def draw(group: Group) -> Figure | None:
    """Draw one panel for each cell with several ranks: the steps in the middle of the cell's first completed repeat."""
    panels = [panel for mark in group.marks if (panel := _build_panel(mark)) is not None]
    if not panels:
        return None
    drawn_panels = panels[:MOST_PANELS]
    legend_phases: set[str] = set()
    data = [trace for number, panel in enumerate(drawn_panels, 1) for trace in _panel_bars(panel, number, legend_phases)]
    late_ranks = [
        f"{panel.mark.label}: rank {straggler.rank} on {escape(panel.late_host)}, {straggler.phase}"
        for panel in drawn_panels
        if (straggler := panel.straggler) is not None
    ]
    instrument_note = "" if INSTRUMENT not in legend_phases else (
        "If an instrument acted between steps, such as a checkpoint that was saved, the steps are those around it. "
    )  # fmt: skip
    caption = (
        f"First completed repeat of each cell on several ranks, up to {MOST_STEPS} timed steps. The phases of a step are drawn "
        "one after the other, also where gradient accumulation repeats them; collectives are within them. "
        f"{instrument_note}Drag along the axis to zoom in, double-click to see all. "
        + (f"The others wait for: {'; '.join(late_ranks)}." if late_ranks else "No rank is found for which the others wait.")
    )
    caption += count_left_out(len(panels) - len(drawn_panels))
    height_px = 80 + sum(HEAD_PX + ROW_PX * len(panel.ranks) for panel in drawn_panels)
    return Figure("step_timeline", "Steps of the ranks on one clock", caption, height_px, data, _panel_layout(drawn_panels))


def _build_panel(mark: CellMark) -> Panel | None:
    run = mark.unresumed_run
    if run is None or run.timed["rank"].n_unique() < 2 or run.undisturbed.is_empty():
        return None
    phases = _drawn_phases(run)
    ranks, straggler = sorted({phase.rank for phase in phases}), timeline.find_straggler(run)
    late_host = "" if straggler is None else timeline.run_clocks(run).host_of(straggler.rank) or timeline.UNKNOWN
    return Panel(mark, phases, ranks, straggler, late_host) if len(ranks) > 1 else None


def _drawn_phases(run: LoadedRun) -> list[StepPhase]:
    """The phases of the steps that are drawn, and what instruments did between these steps, such as saving a checkpoint.

    Steps that an instrument slowed down are not drawn. Times are in ms since the first drawn step began.
    """
    host_clocks, numbers = timeline.run_clocks(run), _drawn_step_numbers(run)
    rows = run.timed.filter(pl.col("step").is_in(numbers), pl.col("rank") < MOST_RANKS)
    spans_by_rank = {int(spans.row.removeprefix("rank ")): spans for spans in timeline.step_spans(rows, host_clocks)}
    zero_s = min((float(spans.start_s.min()) for spans in spans_by_rank.values()), default=0.0)
    acts_between = [
        span for span in instrument_span.read_spans(run.events) if span.rank in spans_by_rank and _is_between(span.act, numbers)
    ]
    acts = []
    for span in acts_between:
        end_s = float(host_clocks.correct_times(span.host, np.array([span.end_s]))[0])
        began_ms = 1000 * (end_s - span.act.seconds - zero_s)
        acts.append(StepPhase(span.rank, INSTRUMENT, timeline.act_label(span.act), began_ms, 1000 * span.act.seconds))
    return [
        phase
        for rank, spans in spans_by_rank.items()
        for phase in _rank_phases(rank, spans, rows.filter(pl.col("rank") == rank).sort("wall_s"), zero_s)
    ] + acts


def _drawn_step_numbers(run: LoadedRun) -> list[int]:
    """The numbers of the steps that are drawn, at most MOST_STEPS.

    If an instrument acted between two steps, the steps around the act that is nearest to the middle of the run are drawn;
    otherwise the steps in the middle of the run.
    """
    numbers: list[int] = run.undisturbed["step"].to_list()
    acts = {(span.act.when, span.act.step) for span in instrument_span.read_spans(run.events)}
    pairs = enumerate(itertools.pairwise(numbers), 1)
    indexes = [index for index, (step, next_step) in pairs if ("after", step) in acts or ("before", next_step) in acts]
    middle = min(indexes, key=lambda place: abs(place - len(numbers) // 2), default=len(numbers) // 2)
    first = min(max(middle - MOST_STEPS // 2, 0), max(len(numbers) - MOST_STEPS, 0))
    return numbers[first : first + MOST_STEPS]


def _is_between(act: InstrumentAct, steps: Sequence[int]) -> bool:
    """Whether `act`, one piece of work of an instrument, happened after the first and before the last of these steps. steps:
    numbers of consecutive steps."""
    return act.step in (steps[:-1] if act.when == "after" else steps[1:])


def _rank_phases(rank: int, spans: Spans, rows: pl.DataFrame, zero_s: float) -> list[StepPhase]:
    phases = []
    for name, start_s, row in zip(spans.names, spans.start_s.tolist(), rows.iter_rows(named=True), strict=True):
        at_ms, left_ms = 1000 * (start_s - zero_s), row["step_ms"]
        for phase in PHASES:
            took_ms = row[phase]
            if took_ms is not None:
                phases.append(StepPhase(rank, phase.removesuffix("_ms"), name, at_ms, took_ms))
                at_ms, left_ms = at_ms + took_ms, left_ms - took_ms
        if left_ms > 0:
            phases.append(StepPhase(rank, "other", name, at_ms, left_ms))
    return phases


def _panel_bars(panel: Panel, number: int, legend_phases: set[str]) -> list[dict[str, Any]]:
    """The bars of a panel. number: the number of the panel, from 1.

    legend_phases: the phases that already have an entry in the legend; this function adds the phases of this panel.
    """
    traces = []
    for phase, colour in COLOURS.items():
        drawn = [bar for bar in panel.phases if bar.phase == phase]
        if not drawn and phase == INSTRUMENT:
            continue
        spans = [(f"rank {bar.rank}", round(bar.start_ms, 3), round(bar.took_ms, 3)) for bar in drawn]
        place = {"xaxis": axis_name("x", number), "yaxis": axis_name("y", number), "meta": panel.mark.row.id}
        texts = {"text": [escape(bar.step) for bar in drawn], "textposition": "none"}
        legend = {"legendgroup": phase, "showlegend": phase not in legend_phases}
        traces.append(span_bars(spans, phase, colour, f"%{{text}}, {phase}: %{{x:.4~g}} ms", **place, **texts, **legend))
        legend_phases.add(phase)
    return traces


def _panel_layout(panels: list[Panel]) -> dict[str, Any]:
    frame = layout({}, {}, showlegend=True, barmode="overlay", bargap=0.15, dragmode="zoom", annotations=[])
    total_px = sum(HEAD_PX + ROW_PX * len(panel.ranks) for panel in panels)
    top = 1.0
    for number, panel in enumerate(panels, 1):
        bottom, plot_top = top - (HEAD_PX + ROW_PX * len(panel.ranks)) / total_px, top - 20 / total_px
        title = "ms since the first of these steps began" if number == len(panels) else ""
        x = axis(title, anchor=axis_name("y", number), showgrid=False, rangemode="tozero", fixedrange=False)
        names = [f"rank {rank}" for rank in reversed(panel.ranks)]
        y = axis("", type="category", categoryorder="array", categoryarray=names, showgrid=False)
        y |= {"domain": [bottom + 24 / total_px, plot_top], "anchor": axis_name("x", number)}
        frame |= {axis_name("xaxis", number): x, axis_name("yaxis", number): y}
        frame["annotations"].append(panel_title(panel.mark.label, plot_top, 2))
        top = bottom
    return frame
