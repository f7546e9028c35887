"""Draws where the time of a step goes: figures of the parts of a profiled step, and of a step with a slowed rank."""

from __future__ import annotations

import statistics

import polars as pl

from collect.drawing.stacked_bars import BarPanel, PartsFigure, draw_bars, select_cells
from collect.figure import INK, LINE, MUTED, SERIES, CellMark, Figure, WorkloadGroup
from collect.findings.comparability import make_key_without_faults
from collect.findings.trace_answers import list_profiled_runs
from collect.findings.trace_details import list_cell_attention
from collect.metrics.rank_times import measure_waiting_by_rank
from collect.metrics.trace_phases import measure_phase_time
from collect.traces import per_step
from collect.traces.breakdown import rename_tallies
from collect.traces.per_step import OperatorUse
from collect.traces.run_answers import RunAnswers
from shardlab.terminal import notation

RANK_THROUGHPUT = "rank_throughput_per_s"
IDLE_CAUSES = {
    "idle_host_ms": "the host launched nothing",
    "idle_launching_ms": "the host was in a launching call",
    "idle_communication_ms": "waiting for communication",
    "idle_other_ms": "other",
}
COLOUR_BY_PHASE = {"data": SERIES[4], "forward": SERIES[1], "backward": SERIES[2], "optimizer": SERIES[3], "other": LINE}
OTHER_KIND = "other"
COLLECTIVES = {"all_reduce": SERIES[1], "all_gather": SERIES[2], "reduce_scatter": SERIES[3], "broadcast": SERIES[4]} | {
    "all_to_all": SERIES[5], "point to point": SERIES[6], OTHER_KIND: SERIES[7],
}  # fmt: skip  # kind of collective -> its colour
COLOUR_BY_ATTENTION_PASS = {
    "flash, forward": SERIES[1], "flash, backward": SERIES[2], "efficient, forward": SERIES[3],
    "efficient, backward": SERIES[4], "cudnn, forward": SERIES[5], "cudnn, backward": SERIES[6], "math, forward": SERIES[7],
    "flex, forward": INK, "flex, backward": MUTED, "fused, forward": INK, "fused, backward": MUTED,
}  # fmt: skip
COLOUR_BY_STRAGGLER_PART = {"work": SERIES[1], "delay on purpose": SERIES[3], "waiting for others": SERIES[2]}
KIND_BY_COLLECTIVE = {kind: kind for kind in COLLECTIVES} | dict.fromkeys(("send", "recv", "send_recv"), "point to point")


def compute_step_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a profiled step of a cell by part. The parts add up to the time from the first kernel to the last."""
    if "idle_ms" not in mark.row.metrics:
        return {}
    times = {part: mark.row.metrics[f"{part}_ms"].value for part in ("compute", "non_compute", "exposed_communication", "idle")}
    return {
        "compute": times["compute"],
        "exposed communication": times["exposed_communication"],
        "exposed memory operations": times["non_compute"] - times["exposed_communication"],
        "idle": times["idle"],
    }


def compute_idle_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a profiled step in which nothing runs, by cause."""
    metrics = mark.row.metrics
    return {text: metrics[metric].value for metric, text in IDLE_CAUSES.items()} if IDLE_CAUSES.keys() <= metrics.keys() else {}


def compute_phase_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a step of a cell by phase, as the mean over the completed runs that were profiled by steps.

    Empty if the traces show only one phase.
    """
    ms_by_phase = {}
    for phase in COLOUR_BY_PHASE:
        run_ms = [time.value for run in mark.cell.completed_runs if (time := measure_phase_time(run, phase)) is not None]
        if run_ms:
            ms_by_phase[phase] = sum(run_ms) / len(run_ms)
    return ms_by_phase if len(ms_by_phase) > 1 else {}


def sum_attention_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of attention in a profiled step by implementation and pass. Kernels whose time is not known are left out."""
    ms_by_pass: dict[str, float] = {}
    for attention_use in list_cell_attention(mark.cell):
        if attention_use.ms:
            pass_name = f"{attention_use.backend}, {'backward' if attention_use.backward else 'forward'}"
            ms_by_pass[pass_name] = ms_by_pass.get(pass_name, 0) + attention_use.ms
    return ms_by_pass


def compute_overlap_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of communication in a profiled step that compute hides, and that it does not hide."""
    metrics = mark.row.metrics
    if not {"overlap_pct", "communication_ms"} <= metrics.keys():
        return {}
    exposed_ms = metrics["exposed_communication_ms"].value
    return {"hidden behind compute": metrics["communication_ms"].value - exposed_ms, "exposed": exposed_ms}


def list_matched_runs(mark: CellMark) -> list[RunAnswers]:
    """The runs of a cell in whose traces the calls of a collective on different ranks were matched with each other."""
    return [run for run in list_profiled_runs(mark.cell) if run.waits.ranks]


def compute_communication_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a step by part. The parts add up to the durations of all matched calls of collectives."""
    if not (runs := list_matched_runs(mark)):
        return {}
    ns_divisor = sum(rank.steps for run in runs for rank in run.ranks) * 1e6
    total_ns = sum(run.ranks[rank_index].calls[call].duration_ns for run in runs for rank_index, call in run.waits.waited_ns)
    waited_ns = sum(rank.waited_ns for run in runs for rank in run.waits.ranks)
    lost_ns = sum(rank.lost_ns for run in runs for rank in run.waits.ranks)
    return {
        "transfer": (total_ns - waited_ns) / ns_divisor,
        "waiting, hidden behind compute": (waited_ns - lost_ns) / ns_divisor,
        "waiting, lost": lost_ns / ns_divisor,
    }


def _describe_lost_time(mark: CellMark) -> str:
    runs = list_matched_runs(mark)
    lost_ns = sum(rank.lost_ns for run in runs for rank in run.waits.ranks)
    span_ns = sum(rank.span_ns for run in runs for rank in run.waits.ranks)
    ranks = {run.waits.straggler.rank for run in runs if run.waits.straggler}
    slowest_text = f", rank {ranks.pop()}" if len(ranks) == 1 else ""  # none if repeats have different slowest ranks
    return f"{notation.format_number(100 * lost_ns / span_ns, 2)} % lost{slowest_text}" if span_ns else ""


def compute_collective_uses(mark: CellMark) -> dict[str, OperatorUse]:
    """The calls and the time of the collectives in a step of a cell, by kind of collective (COLLECTIVES)."""
    runs = (run.traces.exact for run in mark.cell.completed_runs)
    return per_step.compute_uses_per_step(
        runs, lambda breakdown: rename_tallies(breakdown.collectives, lambda name: KIND_BY_COLLECTIVE.get(name, OTHER_KIND))
    )


def _format_count(count: float) -> str:
    return f"{count:,.0f}" if count == round(count) else notation.format_number(count, 3)


def draw_collectives(group: WorkloadGroup) -> Figure | None:
    """Draw two panels side by side: the calls of collectives in a step, and their time. They show whether there are many small
    or a few large calls.

    Each panel has one bar for each cell that was profiled by steps and has collectives.
    """
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(compute_collective_uses(mark)))
    if not drawn_group.marks:
        return None
    uses_of_cells = [compute_collective_uses(mark) for mark in drawn_group.marks]
    panels = []
    for index, unit in enumerate(("calls", "ms")):
        bars = [{kind: use[index] for kind, use in use_by_kind.items()} for use_by_kind in uses_of_cells]
        panels.append(BarPanel(f"{unit} per step", unit, bars, COLLECTIVES, [_format_count(sum(bar.values())) for bar in bars]))
    caption = (
        "One profiled step; mean over profiled ranks and repeats. Times are sums of durations, including the "
        f"wait for other ranks; if collectives run at the same time, each counts fully.{left_out_note}"
    )
    return draw_bars("collectives", "Collectives", caption, drawn_group, panels)


def draw_stragglers(group: WorkloadGroup) -> Figure | None:
    """Draw what a rank that is slowed on purpose costs: two bars for each cell with such a rank, and for the same cell without
    it. None if no cell has a slowed rank."""
    twins = {make_key_without_faults(mark.row.cell) for mark in group.marks if mark.cell.cell.instruments.straggler is not None}
    drawn_group, left_out_note = select_cells(
        group,
        lambda mark: (
            mark.cell.cell.instruments.lost_worker is None
            and make_key_without_faults(mark.row.cell) in twins
            and bool(_compute_median_steps_ms(mark))
            and RANK_THROUGHPUT in mark.row.metrics
        ),
    )
    if not any(mark.cell.cell.instruments.straggler is not None for mark in drawn_group.marks):
        return None
    parts_of_steps = [_compute_straggler_parts(mark) for mark in drawn_group.marks]
    end_texts = [notation.format_number(max(_average_waits_ms(mark)), 2) for mark in drawn_group.marks]
    unit, throughput_name = drawn_group.marks[0].row.metrics[RANK_THROUGHPUT].unit, "throughput of the ranks"
    throughputs = [{throughput_name: mark.row.metrics[RANK_THROUGHPUT].value} for mark in drawn_group.marks]
    panels = [BarPanel("ms per step", "ms", parts_of_steps, COLOUR_BY_STRAGGLER_PART, end_texts)]
    panels.append(BarPanel(unit, unit, throughputs, {throughput_name: SERIES[4]}))
    caption = (
        "Left: a step, mean over ranks and repeats, so a delay of one rank counts by its share. Waiting is what forward, "
        "backward and update take longer than on the rank where they are the shortest. At the end: the longest waiting of a "
        "rank in ms. Right: the sum of the rates of the ranks, each over its own time. A cell with a slowed rank is no "
        f"ordinary run; its name says so.{left_out_note}"
    )
    return draw_bars("stragglers", "Steps with a rank that is slowed on purpose", caption, drawn_group, panels)


def _average_waits_ms(mark: CellMark) -> list[float]:
    """The waiting of each rank in ms per step, mean over repeats."""
    waiting_ms_of_runs = [measure_waiting_by_rank(run) for run in mark.cell.completed_runs]
    return [statistics.fmean(run_waits[rank] for run_waits in waiting_ms_of_runs) for rank in waiting_ms_of_runs[0]]


def _compute_median_steps_ms(mark: CellMark) -> list[float]:
    """The median step of each rank and repeat, in ms; empty if the waiting is not known."""
    if not all(measure_waiting_by_rank(run) for run in mark.cell.completed_runs):
        return []
    medians = [run.timed_steps.group_by("rank").agg(pl.col("step_ms").median())["step_ms"] for run in mark.cell.completed_runs]
    return [median_ms for run_medians in medians for median_ms in run_medians.to_list()]


def _compute_straggler_parts(mark: CellMark) -> dict[str, float]:
    """Milliseconds of a step by part (STRAGGLER_PARTS), mean over ranks."""
    straggler = mark.cell.cell.instruments.straggler
    delay_ms = straggler.delay_ms / mark.cell.cell.gpus if straggler is not None else 0.0
    waiting_ms = statistics.fmean(_average_waits_ms(mark))
    work_ms = max(statistics.fmean(_compute_median_steps_ms(mark)) - delay_ms - waiting_ms, 0.0)
    return dict(zip(COLOUR_BY_STRAGGLER_PART, (work_ms, delay_ms, waiting_ms), strict=True))


BREAKDOWN_FIGURE = PartsFigure(
    "breakdown",
    "Where a step's time went",
    "One profiled step; mean over profiled ranks and repeats. Exposed: while nothing computes. Communication that is "
    "hidden behind compute counts as compute. Profiling itself makes steps longer.",
    compute_step_parts,
    {"compute": SERIES[1], "exposed communication": SERIES[2], "exposed memory operations": SERIES[5], "idle": LINE},
)
OVERLAP_FIGURE = PartsFigure(
    "overlap",
    "Overlap",
    "Communication of a profiled step, including the wait for other ranks; mean over profiled ranks and repeats. At "
    "the end of each bar: the overlap, which is the mean over ranks of the hidden share of their communication.",
    compute_overlap_parts,
    {"hidden behind compute": SERIES[1], "exposed": SERIES[2]},
    lambda mark: f"{notation.format_number(mark.row.metrics['overlap_pct'].value, 3)} % hidden",
    "ms of communication per step",
)
SLOW_RANKS_FIGURE = PartsFigure(
    "slow_ranks",
    "Waiting for slow ranks",
    "Collectives that wait for all ranks, in a profiled step; mean over profiled ranks and repeats. A rank waits "
    "until the last rank has started the collective. At the end of each bar: the share of the step that is lost to "
    "waiting while nothing computes, and the rank that the others wait for the longest.",
    compute_communication_parts,
    {"transfer": SERIES[1], "waiting, hidden behind compute": SERIES[3], "waiting, lost": SERIES[2]},
    _describe_lost_time,
)
IDLE_FIGURE = PartsFigure(
    "idle_causes",
    "Idle time by cause",
    "Time of a profiled step in which nothing runs; mean over profiled ranks and repeats. The host launched nothing: "
    "no launched work waits to run. Other: launched work does not start yet, such as while a launch takes effect.",
    compute_idle_parts,
    dict(zip(IDLE_CAUSES.values(), (SERIES[1], SERIES[3], SERIES[2], SERIES[5]), strict=True)),
    x_title="ms of idle time per step",
)
PHASES_FIGURE = PartsFigure(
    "phases",
    "Phases of a step",
    "One profiled step; mean over profiled ranks and repeats. On a GPU: the union of all kernels and memory operations that a "
    "phase launched; work of two phases may run at the same time, and each counts it. On a CPU: the time of the main thread. "
    "Optimizer and data loader are known by torch's own annotations, backward by autograd.",
    compute_phase_parts,
    COLOUR_BY_PHASE,
)
ATTENTION_FIGURE = PartsFigure(
    "attention",
    "Attention",
    "One profiled step; mean over profiled ranks and repeats. The time of the kernels of each implementation of "
    "attention; on a CPU, of its operators. The backward pass of math consists of ordinary operators and is not drawn.",
    sum_attention_parts,
    COLOUR_BY_ATTENTION_PASS,
)
