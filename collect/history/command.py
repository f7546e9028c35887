"""`collect history`: shows when the same cells ran in several workspaces, how fast they were, and what changed between runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from collect.archiving import command as archiving
from collect.history import periods
from collect.history.periods import CellHistory, HistoryChange, HistoryMetric, HistoryRun
from collect.reading.load import load_matrix
from collect.report import verdict_text
from shardlab.errors import InputError, ShardlabError
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

HEADINGS = [
    "Cell", "Date (UTC)", "Workspace", "n", "Step time", "Throughput", "Train time", "Step / first", "What changed",
]  # fmt: skip
MOST_NAMED_CHANGES = 4  # the most changes that a row of the table names


class History(msgspec.Struct, frozen=True):
    """The JSON document of `collect history`."""

    schema: int
    cells: list[CellHistory]
    """The cells that have runs."""
    skipped: list[str]
    """A sentence for each matrix that cannot be read."""


def show_history(workspace: Workspace, places: Sequence[str], since: str | None, until: str | None, output: Output) -> int:
    """Print the history of all cells of the workspaces and archives. Returns the exit code: 1 if a matrix cannot be read.

    places: folders of workspaces, or archives; empty: `workspace` only. since, until: times in ISO 8601 between which the runs
    were created; None: no limit. Raises InputError if a place has no matrix, or a time cannot be read.
    """
    first_moment, last_moment = _parse_moment(since, "--since"), _parse_moment(until, "--until")
    history_runs: list[HistoryRun] = []
    skipped_clauses: list[str] = []
    with contextlib.ExitStack() as unpacked_archives:
        for place in places or [str(workspace.path)]:
            path = Path(place)
            if not path.exists():
                raise InputError(f"{place}: no such folder or file. Allowed: folders of workspaces, and archives.")
            place_workspace = (
                Workspace(path) if path.is_dir() else unpacked_archives.enter_context(archiving.unpack_as_workspace(path))
            )
            if not place_workspace.list_matrix_names():
                raise InputError(f"{place}: contains no matrix. Allowed: folders of workspaces, and archives.")
            for matrix_name in place_workspace.list_matrix_names():
                try:
                    history_runs += periods.select_history_runs(place, load_matrix(place_workspace, matrix_name))
                except ShardlabError as error:
                    skipped_clauses.append(f"{place}: {matrix_name}: {error}")
        history_runs = [
            history_run
            for history_run in history_runs
            if (first_moment is None or history_run.created_at >= first_moment)
            and (last_moment is None or history_run.created_at <= last_moment)
        ]
        history = History(1, periods.build_histories(history_runs), skipped_clauses)
    _print_history(output, history)
    output.print_document(history)
    return int(bool(skipped_clauses))


def _parse_moment(moment_text: str | None, option: str) -> datetime | None:
    if moment_text is None:
        return None
    moment = moments.parse_time_as_utc(moment_text)
    if moment is None:
        raise InputError(f"{option}: found {moment_text!r}. Allowed: a date or a time in ISO 8601, such as 2031-05-02.")
    return moment


def _print_history(output: Output, history: History) -> None:
    period_rows = []
    for history_of_cell in history.cells:
        for period_number, period in enumerate(history_of_cell.periods):
            dates_text = " to ".join(dict.fromkeys((period.first[:10], period.last[:10])))
            mean_texts = [_mean_text(period.metrics.get(name)) for name in ("step_time_ms", "throughput_per_s", "train_time_s")]
            step_time = period.metrics.get("step_time_ms")
            step_time_ratio = step_time.ratio if step_time is not None and period_number else None
            ratio_text = f"{step_time_ratio:.3f}" if step_time_ratio is not None else ""
            cell_and_dates = ["" if period_number else history_of_cell.cell, dates_text]
            changes_text = _format_changes(period.changed)
            period_rows.append([*cell_and_dates, period.place, str(len(period.runs)), *mean_texts, ratio_text, changes_text])
    if period_rows:
        output.print_table("", HEADINGS, period_rows)
    else:
        output.print_line("no run completed in this time.")
    if any(cell_history.rehearsals for cell_history in history.cells):
        output.print_remark("Some runs are rehearsals: their times say nothing about speed.", style="yellow")
    for sentence in history.skipped:
        output.print_remark(sentence, style="red")


def _mean_text(metric_mean: HistoryMetric | None) -> str:
    return verdict_text.format_quantity(metric_mean.value, metric_mean.unit) if metric_mean is not None else ""


def _format_changes(changes: Sequence[HistoryChange]) -> str:
    change_texts = [
        f"{change.what}: {', '.join(change.before)} -> {', '.join(change.after)}" for change in changes[:MOST_NAMED_CHANGES]
    ]
    change_texts += [f"{len(changes) - MOST_NAMED_CHANGES} more (--json)"] if len(changes) > MOST_NAMED_CHANGES else []
    return "; ".join(change_texts)
