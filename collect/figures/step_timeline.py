"""Draws the steps of all ranks on one clock, with the phases of each step: they show which rank is late, and where others wait.

The reader can zoom the time axis.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from collect.figure import MUTED, CellMark, Figure, Group, axis, layout
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
    "data": "var(--series-5)",
    "forward": "var(--series-1)",
    "backward": "var(--series-2)",
    "optimizer": "var(--series-3)",
    "other": MUTED,
    INSTRUMENT: "var(--series-4)",
}


class StepPhase(NamedTuple):
    """A phase of a step of one rank, or what an instrument did between two steps, such as saving a checkpoint."""

    rank: int
    phase: str
    step: str  # the name of the step, or what the instrument did
    start_ms: float  # ms since the first drawn step began
    took_ms: float  # duration of the phase in ms


class Panel(NamedTuple):
    """The panel that shows the steps of one cell."""

    mark: CellMark
    phases: list[StepPhase]  # the phases of all drawn steps
    ranks: list[int]  # the drawn ranks, in order
    straggler: Straggler | None  # the rank that the others wait for; None: no such rank was found
    late_host: str  # the host of this rank; "" if there is no such rank


def draw(group: Group) -> Figure | None:
    """Draw one panel for each cell with several ranks: the steps in the middle of the cell's first completed repeat."""
    found = [panel for mark in group.marks if (panel := _panel(mark)) is not None]
    if not found:
        return None
    shown = found[:MOST_PANELS]
    named: set[str] = set()
    data = [trace for number, panel in enumerate(shown, 1) for trace in _bars(panel, number, named)]
    late = [
        f"{panel.mark.label}: rank {one.rank} on {html.escape(panel.late_host, quote=False)}, {one.phase}"
        for panel in shown
        if (one := panel.straggler) is not None
    ]
    around = "" if INSTRUMENT not in named else (
        "If an instrument acted between steps, such as a checkpoint that was saved, the steps are those around it. "
    )  # fmt: skip
    caption = (
        f"First completed repeat of each cell on several ranks, up to {MOST_STEPS} timed steps. The phases of a step are drawn "
        "one after the other, also where gradient accumulation repeats them; collectives are within them. "
        f"{around}Drag along the axis to zoom in, double-click to see all. "
        + (f"The others wait for: {'; '.join(late)}." if late else "No rank is found for which the others wait.")
    )
    if len(found) > len(shown):
        caption += f" {len(found) - len(shown)} more cells are not drawn."
    height_px = 80 + sum(HEAD_PX + ROW_PX * len(panel.ranks) for panel in shown)
    return Figure("step_timeline", "Steps of the ranks on one clock", caption, height_px, data, _panels(shown))


def _panel(mark: CellMark) -> Panel | None:
    run = next((run for run in mark.cell.completed if not run.resumed), None)
    if run is None or run.timed["rank"].n_unique() < 2 or run.undisturbed.is_empty():
        return None
    phases = _phases(run)
    ranks, late = sorted({phase.rank for phase in phases}), timeline.straggler_of(run)
    late_host = "" if late is None else timeline.clocks(run).host_of(late.rank) or timeline.UNKNOWN
    return Panel(mark, phases, ranks, late, late_host) if len(ranks) > 1 else None


def _phases(run: LoadedRun) -> list[StepPhase]:
    """The phases of the steps that are drawn, and what instruments did between these steps, such as saving a checkpoint.

    Steps that an instrument slowed down are not drawn. Times are in ms since the first drawn step began.
    """
    compared, wanted = timeline.clocks(run), _wanted(run)
    rows = run.timed.filter(pl.col("step").is_in(wanted), pl.col("rank") < MOST_RANKS)
    spans_of = {int(spans.row.removeprefix("rank ")): spans for spans in timeline.steps(rows, compared)}
    zero_s = min((float(spans.start_s.min()) for spans in spans_of.values()), default=0.0)
    between = [one for one in instrument_span.of(run.events) if one.rank in spans_of and _is_between(one.act, wanted)]
    acts = []
    for one in between:
        end_s = float(compared.corrected(one.host, np.array([one.end_s]))[0])
        began_ms = 1000 * (end_s - one.act.seconds - zero_s)
        acts.append(StepPhase(one.rank, INSTRUMENT, timeline.act_label(one.act), began_ms, 1000 * one.act.seconds))
    return [
        phase
        for rank, spans in spans_of.items()
        for phase in _of_rank(rank, spans, rows.filter(pl.col("rank") == rank).sort("wall_s"), zero_s)
    ] + acts


def _wanted(run: LoadedRun) -> list[int]:
    """The numbers of the steps that are drawn, at most MOST_STEPS.

    If an instrument acted between two steps, the steps around the act that is nearest to the middle of the run are drawn;
    otherwise the steps in the middle of the run.
    """
    numbers: list[int] = run.undisturbed["step"].to_list()
    acted = {(span.act.when, span.act.step) for span in instrument_span.of(run.events)}
    pairs = enumerate(itertools.pairwise(numbers), 1)
    places = [place for place, (one, following) in pairs if ("after", one) in acted or ("before", following) in acted]
    middle = min(places, key=lambda place: abs(place - len(numbers) // 2), default=len(numbers) // 2)
    first = min(max(middle - MOST_STEPS // 2, 0), max(len(numbers) - MOST_STEPS, 0))
    return numbers[first : first + MOST_STEPS]


def _is_between(act: InstrumentAct, steps: Sequence[int]) -> bool:
    """Whether `act`, one piece of work of an instrument, happened after the first and before the last of these steps. steps:
    numbers of consecutive steps."""
    return act.step in (steps[:-1] if act.when == "after" else steps[1:])


def _of_rank(rank: int, spans: Spans, rows: pl.DataFrame, zero_s: float) -> list[StepPhase]:
    found = []
    for name, start_s, row in zip(spans.names, spans.start_s.tolist(), rows.iter_rows(named=True), strict=True):
        at_ms, left_ms = 1000 * (start_s - zero_s), row["step_ms"]
        for phase in PHASES:
            took_ms = row[phase]
            if took_ms is not None:
                found.append(StepPhase(rank, phase.removesuffix("_ms"), name, at_ms, took_ms))
                at_ms, left_ms = at_ms + took_ms, left_ms - took_ms
        if left_ms > 0:
            found.append(StepPhase(rank, "other", name, at_ms, left_ms))
    return found


def _bars(panel: Panel, number: int, named: set[str]) -> list[dict[str, Any]]:
    """The bars of a panel. number: the number of the panel, from 1.

    named: the phases that already have an entry in the legend; this function adds the phases of this panel.
    """
    made = []
    for phase, colour in COLOURS.items():
        drawn = [one for one in panel.phases if one.phase == phase]
        if not drawn and phase == INSTRUMENT:
            continue
        made.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": phase,
                "legendgroup": phase,
                "meta": panel.mark.row.id,
                "showlegend": phase not in named,
                "marker": {"color": colour, "line": {"width": 0}},
                "base": [round(one.start_ms, 3) for one in drawn],
                "x": [round(one.took_ms, 3) for one in drawn],
                "y": [f"rank {one.rank}" for one in drawn],
                "text": [html.escape(one.step, quote=False) for one in drawn],
                "textposition": "none",
                "xaxis": _axis("x", number),
                "yaxis": _axis("y", number),
                "hovertemplate": f"%{{text}}, {phase}: %{{x:.4~g}} ms",
            }
        )
        named.add(phase)
    return made


def _panels(shown: list[Panel]) -> dict[str, Any]:
    shape = layout({}, {}, showlegend=True, barmode="overlay", bargap=0.15, dragmode="zoom")
    shape["annotations"] = []
    whole = sum(HEAD_PX + ROW_PX * len(panel.ranks) for panel in shown)
    top = 1.0
    for number, panel in enumerate(shown, 1):
        bottom = top - (HEAD_PX + ROW_PX * len(panel.ranks)) / whole
        begin = top - 20 / whole
        title = "ms since the first of these steps began" if number == len(shown) else ""
        time = axis(title, anchor=_axis("y", number), showgrid=False, rangemode="tozero", fixedrange=False)
        shape[_axis("xaxis", number)] = time
        names = [f"rank {rank}" for rank in panel.ranks]
        rows = axis("", type="category", categoryorder="array", categoryarray=names[::-1], showgrid=False)
        shape[_axis("yaxis", number)] = rows | {"domain": [bottom + 24 / whole, begin], "anchor": _axis("x", number)}
        at = {"xref": "paper", "yref": "paper", "x": 0, "y": begin, "xanchor": "left", "yanchor": "bottom", "yshift": 2}
        shape["annotations"].append(at | {"text": panel.mark.label, "showarrow": False, "font": {"size": 12, "color": MUTED}})
        top = bottom
    return shape


def _axis(name: str, number: int) -> str:
    """Plotly's name of an axis, such as `x2`. name: `x`, `y`, `xaxis` or `yaxis`. number: the number of the axis, from 1."""
    return name if number == 1 else f"{name}{number}"
