"""Draws timelines: the steps of the ranks on one clock, and one run from its start to its end. The reader can zoom the time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from collect.drawing.axes import make_axis, make_layout, make_panel_title, name_axis
from collect.drawing.panels import PANEL_PX, add_panel
from collect.drawing.traces import make_points, make_span_bars, thin_points
from collect.figure import MUTED, PLAYED, SERIES, CellMark, Figure, WorkloadGroup, describe_rest, escape, note_played
from collect.loading.loaded_run import LoadedRun
from collect.timeline import timeline
from collect.timeline.straggler import PHASE_COLUMNS
from collect.timeline.timeline import CounterTrack, RowSpans, RunTimeline
from shardlab.runs import instrument_span
from shardlab.runs.instrument_span import InstrumentAct

MOST_RANKS = 16  # the most ranks of a panel or of a run, starting with rank 0
# Of the figure of steps. Heights: of a rank's row, and of a panel's title with the distance to the next panel.
STEP_ROW_PX, STEP_HEAD_PX = 22, 44
MOST_PANELS = 6
MOST_STEPS = 10  # the most steps that are drawn, from the middle of the timed steps
INSTRUMENT_BAR = "instrument"  # name of the bars that show what an instrument did between steps, such as saving a checkpoint
COLOUR_BY_PHASE = {"data": SERIES[5], "forward": SERIES[1], "backward": SERIES[2], "optimizer": SERIES[3], "other": MUTED} | {
    INSTRUMENT_BAR: SERIES[4]
}
# Of the figure of a run.
RUN_ROW_PX, RUN_HEAD_PX = 20, 30
MOST_BARS = 250  # about the most bars of a rank: if it has more steps, a bar stands for several consecutive steps
MOST_LINES = 16  # the most lines of a panel
# kind of a bar -> its colour
COLOUR_BY_STEP_KIND = {"steps": SERIES[1], "warm-up steps": MUTED, "steps with an instrument": SERIES[5]} | {
    "instruments between steps": SERIES[4]
}
PANELS = (  # (title of a panel, how the names of the counters that the panel shows end)
    ("Processors busy (%)", "processors busy"),
    ("GPU busy (%)", "utilization"),
    ("Sent (MB/s)", " sent"),
    ("Received (MB/s)", " received"),
)


class TimeBar(NamedTuple):
    """A bar in the row of a rank: a phase of a step, one or several steps, or an act of an instrument, such as saving a
    checkpoint."""

    row_name: str
    """Such as `rank 0`."""
    kind: str
    """A key of PHASE_COLOURS or STEP_KINDS."""
    start: float
    """The time since the first drawn step began, in the unit of the figure."""
    length: float
    """In the same unit."""
    description: str
    """Says what the bar is."""


def _make_bar_traces(bars: Sequence[TimeBar], colours: Mapping[str, str], template: str, digits: int) -> list[dict[str, Any]]:
    """A trace for each kind of bars. template: plotly's `hovertemplate`, with KIND for the kind. digits: the number of decimals
    of the times."""
    traces = []
    for kind, colour in colours.items():
        if drawn_bars := [bar for bar in bars if bar.kind == kind]:
            spans = [(bar.row_name, round(bar.start, digits), round(bar.length, digits)) for bar in drawn_bars]
            text_style = {"text": [escape(bar.description) for bar in drawn_bars], "textposition": "none", "legendgroup": kind}
            traces.append(make_span_bars(spans, kind, colour, template.replace("KIND", kind), **text_style))
    return traces


def _make_rows_axis(row_names: Sequence[str], bottom: float, top: float, anchor: str) -> dict[str, Any]:
    """The y axis of rows with these names, from top to bottom. bottom, top: its place, as shares of the height of the plots."""
    axis_settings = {"domain": [bottom, top], "anchor": anchor, "showgrid": False}
    return make_axis("", type="category", categoryorder="array", categoryarray=list(reversed(row_names)), **axis_settings)


class StepPanel(NamedTuple):
    """The panel that shows the steps of one cell."""

    mark: CellMark
    bars: list[TimeBar]
    """The phases of all drawn steps, in ms."""
    row_names: list[str]
    """The names of the drawn ranks, in order."""
    late_rank: str
    """The rank that the others wait for, with its host and the phase; "" if no such rank was found."""

    @property
    def height_px(self) -> int:
        """The height with the title."""
        return STEP_HEAD_PX + STEP_ROW_PX * len(self.row_names)


def draw_steps(group: WorkloadGroup) -> Figure | None:
    """Draw the steps of all ranks on one clock, with the phases of each step: they show which rank is late, and where others
    wait. There is one panel for each cell with several ranks: the steps in the middle of its first completed repeat."""
    panels = [panel for mark in group.marks if (panel := _build_step_panel(mark)) is not None]
    drawn_panels = panels[:MOST_PANELS]
    layout = make_layout({}, {}, showlegend=True, barmode="overlay", bargap=0.15, dragmode="zoom", annotations=[])
    height_px, top, legend_phases = sum(panel.height_px for panel in drawn_panels), 1.0, set[str]()
    data: list[dict[str, Any]] = []
    for panel_number, panel in enumerate(drawn_panels, 1):
        x_name, y_name = name_axis("x", panel_number), name_axis("y", panel_number)
        for trace in _make_bar_traces(panel.bars, COLOUR_BY_PHASE, "%{text}, KIND: %{x:.4~g} ms", 3):
            is_new = trace["name"] not in legend_phases
            data.append(trace | {"xaxis": x_name, "yaxis": y_name, "meta": panel.mark.row.id, "showlegend": is_new})
            legend_phases.add(trace["name"])
        bottom, plot_top = top - panel.height_px / height_px, top - 20 / height_px
        time_title = "ms since the first of these steps began" if panel_number == len(drawn_panels) else ""
        x_axis = make_axis(time_title, anchor=y_name, showgrid=False, rangemode="tozero", fixedrange=False)
        y_axis = _make_rows_axis(panel.row_names, bottom + 24 / height_px, plot_top, x_name)
        layout |= {name_axis("xaxis", panel_number): x_axis, name_axis("yaxis", panel_number): y_axis}
        layout["annotations"].append(make_panel_title(panel.mark.label, plot_top, yshift=2))
        top = bottom
    late_ranks = [f"{panel.mark.label}: {escape(panel.late_rank)}" for panel in drawn_panels if panel.late_rank]
    instrument_note = "" if INSTRUMENT_BAR not in legend_phases else (
        "If an instrument acted between steps, such as a checkpoint that was saved, the steps are those around it. "
    )  # fmt: skip
    caption = (
        f"First completed repeat of each cell on several ranks, up to {MOST_STEPS} timed steps. The phases of a step are drawn "
        "one after the other, also where gradient accumulation repeats them; collectives are within them. "
        f"{instrument_note}Drag along the axis to zoom in, double-click to see all. "
        + (f"The others wait for: {'; '.join(late_ranks)}." if late_ranks else "No rank is found for which the others wait.")
        + describe_rest(len(panels) - len(drawn_panels))
    )
    return Figure("step_timeline", "Steps of the ranks on one clock", caption, 80 + height_px, data, layout) if panels else None


def _build_step_panel(mark: CellMark) -> StepPanel | None:
    run = mark.unresumed_run
    if run is None or run.timed_steps["rank"].n_unique() < 2 or run.undisturbed_steps.is_empty():
        return None
    bars, straggler = _make_phase_bars(run), timeline.find_straggler(run)
    row_names = [name for name in (f"rank {rank}" for rank in range(MOST_RANKS)) if any(bar.row_name == name for bar in bars)]
    late_rank = ""
    if straggler is not None:
        host = timeline.compare_host_clocks(run).find_host(straggler.rank) or timeline.UNKNOWN_HOST
        late_rank = f"rank {straggler.rank} on {host}, {straggler.phase}"
    return StepPanel(mark, bars, row_names, late_rank) if len(row_names) > 1 else None


def _make_phase_bars(run: LoadedRun) -> list[TimeBar]:
    """The phases of the steps that are drawn, and what instruments did between these steps, such as saving a checkpoint.

    Steps that an instrument slowed down are not drawn. Times are in ms since the first drawn step began.
    """
    host_clocks, numbers = timeline.compare_host_clocks(run), _choose_step_numbers(run)
    steps = run.timed_steps.filter(pl.col("step").is_in(numbers), pl.col("rank") < MOST_RANKS)
    spans_by_rank = {int(spans.row_name.removeprefix("rank ")): spans for spans in timeline.list_step_spans(steps, host_clocks)}
    origin_s = min((float(spans.start_s.min()) for spans in spans_by_rank.values()), default=0.0)
    acts_between_steps = [
        span for span in instrument_span.read_spans(run.events) if span.rank in spans_by_rank and _is_inside(span.act, numbers)
    ]
    act_bars = []
    for span in acts_between_steps:
        end_s = float(host_clocks.correct_times(span.host, np.array([span.end_s]))[0])
        start_ms = 1000 * (end_s - span.act.seconds - origin_s)
        act_text, duration_ms = timeline.label_act(span.act), 1000 * span.act.seconds
        act_bars.append(TimeBar(f"rank {span.rank}", INSTRUMENT_BAR, start_ms, duration_ms, act_text))
    return [
        bar
        for rank, spans in spans_by_rank.items()
        for bar in _make_rank_bars(spans, steps.filter(pl.col("rank") == rank).sort("wall_s"), origin_s)
    ] + act_bars


def _choose_step_numbers(run: LoadedRun) -> list[int]:
    """The numbers of the steps that are drawn, at most MOST_STEPS.

    If an instrument acted between two steps, the steps around the act that is nearest to the middle of the run are drawn;
    otherwise the steps in the middle of the run.
    """
    step_numbers: list[int] = run.undisturbed_steps["step"].to_list()
    acts = {(span.act.when, span.act.step) for span in instrument_span.read_spans(run.events)}
    step_pairs = enumerate(itertools.pairwise(step_numbers), 1)
    act_indexes = [index for index, (step, next_step) in step_pairs if ("after", step) in acts or ("before", next_step) in acts]
    middle_index = min(act_indexes, key=lambda index: abs(index - len(step_numbers) // 2), default=len(step_numbers) // 2)
    first_index = min(max(middle_index - MOST_STEPS // 2, 0), max(len(step_numbers) - MOST_STEPS, 0))
    return step_numbers[first_index : first_index + MOST_STEPS]


def _is_inside(act: InstrumentAct, step_numbers: Sequence[int]) -> bool:
    """Whether `act`, one piece of work of an instrument, happened after the first and before the last of these steps.
    step_numbers: numbers of consecutive steps."""
    return act.step in (step_numbers[:-1] if act.when == "after" else step_numbers[1:])


def _make_rank_bars(spans: RowSpans, steps: pl.DataFrame, origin_s: float) -> list[TimeBar]:
    phase_bars = []
    for step_name, start_s, step_record in zip(spans.names, spans.start_s.tolist(), steps.iter_rows(named=True), strict=True):
        start_ms, remaining_ms = 1000 * (start_s - origin_s), step_record["step_ms"]
        for phase in PHASE_COLUMNS:
            duration_ms = step_record[phase]
            if duration_ms is not None:
                phase_bars.append(TimeBar(spans.row_name, phase.removesuffix("_ms"), start_ms, duration_ms, step_name))
                start_ms, remaining_ms = start_ms + duration_ms, remaining_ms - duration_ms
        if remaining_ms > 0:
            phase_bars.append(TimeBar(spans.row_name, "other", start_ms, remaining_ms, step_name))
    return phase_bars


def draw_run(group: WorkloadGroup) -> Figure | None:
    """Draw one run from its start to its end, with the times of all hosts on one corrected clock: a completed repeat that did
    not resume from a checkpoint. The steps and instruments of every rank are on top; below them are the processors, GPUs and
    network of every host.

    Of the cells with such a repeat, the cell with the most ranks is chosen, and its first such repeat is drawn. None if no cell
    has such a repeat, or if the run has only one rank and no telemetry.
    """
    runs_of_marks = [(mark, run) for mark in group.marks if (run := mark.unresumed_run) is not None]
    if not runs_of_marks:
        return None
    mark, run = max(runs_of_marks, key=lambda pair: pair[1].cell.gpus)
    run_timeline = timeline.build_timeline(run)
    if not run_timeline.steps:
        return None
    origin_s = min(float(spans.start_s[0]) for spans in run_timeline.steps)
    bars = [bar for spans in run_timeline.steps[:MOST_RANKS] for bar in _make_step_bars(spans, origin_s)]
    row_names = list(dict.fromkeys(bar.row_name for bar in bars))
    for spans in run_timeline.instruments:
        if (row_name := spans.row_name.removesuffix(" instruments")) in row_names:
            bars += _make_instrument_bars(spans, row_name, origin_s)
    panels = [(title, counters) for title, name_suffix in PANELS if (counters := _pick_counters(run_timeline, name_suffix))]
    if not panels and len(row_names) < 2:
        return None
    caption = (
        f"{mark.label}: its first completed repeat, all hosts on the clock of rank 0's host. Where steps are "
        "many, a bar has several of them. Drag along the axis to zoom in, double-click to see all. `collect timeline "
        "RUN --perfetto FILE` has every step of any run, and the profiled operators."
    )
    if run_timeline.uncorrected_hosts:
        caption += f" Not compared with the other clocks: {', '.join(escape(host) for host in run_timeline.uncorrected_hosts)}."
    caption += note_played([mark.label] * run.plays_gpus)
    rows_px = RUN_HEAD_PX + RUN_ROW_PX * len(row_names)
    total_px = rows_px + PANEL_PX * len(panels)
    steps_bottom = 1 - rows_px / total_px
    x_axis = make_axis("s since the first step began", anchor=name_axis("y", 1 + len(panels)), showgrid=False, fixedrange=False)
    y_axis = _make_rows_axis(row_names, steps_bottom, 1.0, "x")
    layout = make_layout(x_axis, y_axis, showlegend=True, barmode="overlay", bargap=0.15, dragmode="zoom", annotations=[])
    traces = _make_bar_traces(bars, COLOUR_BY_STEP_KIND, "%{text}: %{x:.4~g} s", 4)
    for number, (title, counters) in enumerate(panels, 2):
        low = steps_bottom - (number - 1) * PANEL_PX / total_px
        panel_top = steps_bottom - ((number - 2) * PANEL_PX + RUN_HEAD_PX) / total_px
        add_panel(layout, number, f"{title}{PLAYED * (run.plays_gpus and title.startswith('GPU'))}", max(low, 0.0), panel_top)
        traces += _make_counter_traces(counters, number, origin_s)
    traces = [trace | {"meta": mark.row.id} for trace in traces]
    return Figure("run_timeline", "One run on one clock", caption, 110 + total_px, traces, layout)


def _make_step_bars(spans: RowSpans, origin_s: float) -> list[TimeBar]:
    """The bars of the steps of one rank. If the rank has more than MOST_BARS steps, consecutive steps of the same kind are
    merged.

    origin_s: the time of the corrected clock at which the time axis starts.
    """
    steps_per_bar = -(-len(spans.names) // MOST_BARS)
    bars: list[TimeBar] = []
    merged_count = 0  # number of steps in the last bar
    for step, start_s, end_s in zip(spans.names, spans.start_s.tolist(), spans.end_s.tolist(), strict=True):
        kind = "warm-up steps" if step.startswith("warm-up") else "steps with an instrument" if step.endswith(")") else "steps"
        if bars and bars[-1].kind == kind and 0 < merged_count < steps_per_bar:
            last_bar = bars[-1]
            merged_text = f"{last_bar.description.partition(' to ')[0]} to {step}"
            bars[-1], merged_count = (
                last_bar._replace(length=end_s - origin_s - last_bar.start, description=merged_text),
                merged_count + 1,
            )
        else:
            bars.append(TimeBar(spans.row_name, kind, start_s - origin_s, end_s - start_s, step))
            merged_count = 1
    return bars


def _make_instrument_bars(spans: RowSpans, row_name: str, origin_s: float) -> list[TimeBar]:
    act_times = zip(spans.names, spans.start_s.tolist(), spans.end_s.tolist(), strict=True)
    return [
        TimeBar(row_name, "instruments between steps", start_s - origin_s, end_s - start_s, act_name)
        for act_name, start_s, end_s in act_times
    ]


def _pick_counters(run_timeline: RunTimeline, name_suffix: str) -> list[CounterTrack]:
    """The counters that a panel shows: at most MOST_LINES, those with the highest values, without counters that are always 0.

    name_suffix: how the names of the counters of this panel end.
    """
    matching_counters = [
        counter
        for counter in run_timeline.counters
        if counter.name.endswith(name_suffix) and len(counter.values) > 1 and np.any(counter.values > 0)
    ]
    highest_counters = sorted(matching_counters, key=lambda counter: -float(np.max(counter.values)))[:MOST_LINES]
    return [counter for counter in matching_counters if any(counter is highest_counter for highest_counter in highest_counters)]


def _make_counter_traces(counters: Sequence[CounterTrack], panel_number: int, origin_s: float) -> list[dict[str, Any]]:
    traces = []
    for index, counter in enumerate(counters):
        x, y = thin_points((counter.at_s - origin_s).tolist(), counter.values.tolist())
        x = [round(time_s, 3) for time_s in x]
        y = [None if counter_value is None else float(f"{counter_value:.4g}") for counter_value in y]
        line_style = {"line": {"color": SERIES[index % len(SERIES) + 1], "width": 1.2}, "showlegend": False}
        hover_settings = {"yaxis": name_axis("y", panel_number), "hovertemplate": "%{y:.4~g} at %{x:.2f} s"}
        traces.append(make_points("lines", x, y, name=escape(f"{counter.host} {counter.name}"), **line_style, **hover_settings))
    return traces
