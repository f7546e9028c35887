"""`collect timeline`: shows all ranks and hosts of a run on one clock, and the straggler, the rank for which the others
wait."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from collect.loading.loaded_run import LoadedRun
from collect.timeline import perfetto
from collect.timeline.clocks import ComparedClock
from collect.timeline.straggler import PHASE_COLUMNS
from collect.timeline.timeline import RunTimeline, build_timeline, label_act, list_trace_spans
from shardlab.errors import InputError
from shardlab.matrix import faults
from shardlab.runs import instrument_span
from shardlab.runs.instrument_span import InstrumentSpan
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.terminal.console import Output
from shardlab.terminal.table import Column, Table
from shardlab.workspace.workspace import Workspace


def show_timeline(workspace: Workspace, run_name: str, file: str | None, output: Output) -> int:
    """Print the times of the ranks, the clocks of the hosts and the straggler of a run.

    file: where to write the timeline for Perfetto (a program that shows traces); None to write no file.
    Returns exit code 0. Raises InputError if the run has neither steps nor telemetry.
    """
    run = LoadedRun.read(workspace.find_run_dir(run_name))
    run_id = run.run_id
    timeline = build_timeline(run)
    if not (timeline.steps or timeline.counters):
        raise InputError(
            f"{run.folder.path}: no steps and no telemetry, so there is no timeline. Allowed: a run that has begun."
        )
    rank_rows = _make_rank_rows(timeline, run.timed_steps)
    output.show_table(Table(f"{run_id}: medians over the timed steps", RANK_COLUMNS, rank_rows))
    clocks = sorted(timeline.clocks.clock_by_host.values(), key=lambda clock: clock.first_rank)
    if clocks:
        output.show_table(Table("clocks", CLOCK_COLUMNS, clocks))
    acts = [*instrument_span.read_spans(run.events)]
    if acts:
        table_title = "instruments between steps, over all ranks"
        output.show_table(Table(table_title, INSTRUMENT_COLUMNS, _group_by_instrument(acts)))
    output.print_line(_describe_straggler(timeline))
    if run.is_rehearsal:
        output.print_line(REHEARSAL_NOTE, style="yellow")
    if run.run is not None and (fault_text := faults.describe_faults(msgspec.to_builtins(run.cell.instruments))):
        output.print_line(f"on purpose, so this is no ordinary run: {fault_text}.")
    for host in timeline.uncorrected_hosts:
        output.print_remark(f"{host}: its clock was not compared with the others, so its times are as its own clock had them.")
    json_document: dict[str, Any] = {
        "run": run_id,
        "rehearsal": run.is_rehearsal,
        "ranks": rank_rows,
        "clocks": [msgspec.to_builtins(clock) | {"drift_s": clock.drift_s} for clock in clocks],
        "uncorrected": timeline.uncorrected_hosts,
        "instruments": [
            {"rank": span.rank, "host": span.host, "end_s": span.end_s} | msgspec.to_builtins(span.act) for span in acts
        ],
        "straggler": _make_straggler_document(timeline),
        "faults": faults.describe_faults(msgspec.to_builtins(run.cell.instruments)) if run.run is not None else "",
    }
    if file is not None:
        count = perfetto.write_perfetto_file(Path(file), timeline, list_trace_spans(run), " (rehearsal)" * run.is_rehearsal)
        output.print_line(f"{count:,} events: {file} (open it with ui.perfetto.dev, which reads it in the browser)")
        json_document |= {"file": file, "events": count}
    output.print_document(json_document)
    return 0


def _make_rank_rows(timeline: RunTimeline, timed_steps: pl.DataFrame) -> list[dict[str, Any]]:
    """The rows of the table of ranks, one for each rank that recorded timed steps.

    A row has the number and the host of the rank, the number of its timed steps, and the medians of their times in ms.
    """
    medians = timed_steps.group_by("rank").agg(
        pl.len().alias("steps"), *(pl.col(column_name).median() for column_name in ("step_ms", *PHASE_COLUMNS))
    )
    return [{"rank": row["rank"], "host": timeline.find_host(row["rank"])} | row for row in medians.sort("rank").to_dicts()]


def _format_ms(time_ms: float | None) -> str:
    return "" if time_ms is None else f"{time_ms:.4g}"


def _group_by_instrument(instrument_spans: Sequence[InstrumentSpan]) -> list[list[InstrumentSpan]]:
    """The spans of each instrument, the longest span first."""
    spans_by_name: dict[str, list[InstrumentSpan]] = {}
    for span in instrument_spans:
        spans_by_name.setdefault(span.act.name, []).append(span)
    return [sorted(spans, key=lambda span: -span.act.seconds) for spans in spans_by_name.values()]


def _describe_straggler(timeline: RunTimeline) -> str:
    straggler = timeline.straggler
    if straggler is None:
        return "straggler: none found. Ranks differ by less than 5 % of a step, or have too few steps (at least 3 on 2 ranks)."
    return (
        f"straggler: rank {straggler.rank} on {timeline.find_host(straggler.rank)}, {straggler.phase}: "
        f"{straggler.late_ms:.4g} ms longer than the median rank in each step ({straggler.share_pct:.0f} % of "
        f"{straggler.step_ms:.4g} ms); found by {straggler.by}."
    )


def _make_straggler_document(timeline: RunTimeline) -> dict[str, Any] | None:
    straggler = timeline.straggler
    return None if straggler is None else {"host": timeline.find_host(straggler.rank)} | msgspec.to_builtins(straggler)


def _make_phase_column(phase_column: str) -> Column[dict[str, Any]]:
    return Column(phase_column.removesuffix("_ms").capitalize(), lambda row: _format_ms(row[phase_column]), "ms")


RANK_COLUMNS: list[Column[dict[str, Any]]] = [
    Column("Rank", lambda row: row["rank"]),
    Column("Host", lambda row: row["host"], is_number=False),
    Column("Timed steps", lambda row: row["steps"]),
    *(_make_phase_column(name) for name in ("step_ms", *PHASE_COLUMNS)),
]
CLOCK_COLUMNS: list[Column[ComparedClock]] = [
    Column("Host", lambda clock: clock.host, is_number=False),
    Column("First rank", lambda clock: clock.first_rank),
    Column("Ahead of the clock of rank 0's host", lambda clock: f"{1000 * clock.offset_s[0]:.3f}", "ms"),
    Column("Uncertainty", lambda clock: f"{1000 * clock.within_s:.3f}", "± ms"),
    Column("Drift in the run", lambda clock: "" if clock.drift_s is None else f"{1000 * clock.drift_s:.3f}", "ms"),
]
INSTRUMENT_COLUMNS: list[Column[list[InstrumentSpan]]] = [  # of rows that are the spans of an instrument, the longest first
    Column("Instrument", lambda spans: spans[0].act.name),
    Column("Acts", len),
    Column("Median", lambda spans: _format_ms(1000 * statistics.median(span.act.seconds for span in spans)), "ms"),
    Column("Longest", lambda spans: _format_ms(1000 * spans[0].act.seconds), "ms"),
    Column("Longest on", lambda spans: f"rank {spans[0].rank}, {spans[0].host}"),
    Column("Longest was", lambda spans: label_act(spans[0].act)),
]
