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

COLUMNS = ["Cell", "Date (UTC)", "Workspace", "n", "Step time", "Throughput", "Train time", "Step / first", "What changed"]
MOST_CHANGES = 4  # the most changes that a row of the table names


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
    first, last = _parse_moment(since, "--since"), _parse_moment(until, "--until")
    entries: list[HistoryRun] = []
    skipped: list[str] = []
    with contextlib.ExitStack() as opened:
        for place in places or [str(workspace.path)]:
            path = Path(place)
            if not path.exists():
                raise InputError(f"{place}: no such folder or file. Allowed: folders of workspaces, and archives.")
            source = Workspace(path) if path.is_dir() else opened.enter_context(archiving.unpack_as_workspace(path))
            if not source.matrix_names():
                raise InputError(f"{place}: contains no matrix. Allowed: folders of workspaces, and archives.")
            for name in source.matrix_names():
                try:
                    entries += periods.select_history_runs(place, load_matrix(source, name))
                except ShardlabError as error:
                    skipped.append(f"{place}: {name}: {error}")
        entries = [entry for entry in entries if (first is None or entry.at >= first) and (last is None or entry.at <= last)]
        document = History(1, periods.build_histories(entries), skipped)
    _print_history(output, document)
    output.print_document(document)
    return int(bool(skipped))


def _parse_moment(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    moment = moments.parse_time_as_utc(text)
    if moment is None:
        raise InputError(f"{option}: found {text!r}. Allowed: a date or a time in ISO 8601, such as 2031-05-02.")
    return moment


def _print_history(output: Output, document: History) -> None:
    rows = []
    for history in document.cells:
        for number, period in enumerate(history.periods):
            span = period.first[:10] if period.first[:10] == period.last[:10] else f"{period.first[:10]} to {period.last[:10]}"
            figures = [_mean_text(period.metrics.get(name)) for name in ("step_time_ms", "throughput_per_s", "train_time_s")]
            step_time = period.metrics.get("step_time_ms")
            ratio = f"{step_time.ratio:.3f}" if step_time is not None and step_time.ratio is not None and number else ""
            rows.append(
                [
                    "" if number else history.cell,
                    span,
                    period.place,
                    str(len(period.runs)),
                    *figures,
                    ratio,
                    _changes_text(period.changed),
                ]
            )
    if rows:
        output.print_table("", COLUMNS, rows)
    else:
        output.print_line("no run completed in this time.")
    if any(cell_history.rehearsals for cell_history in document.cells):
        output.print_remark("Some runs are rehearsals: their times say nothing about speed.", style="yellow")
    for sentence in document.skipped:
        output.print_remark(sentence, style="red")


def _mean_text(mean: HistoryMetric | None) -> str:
    return verdict_text.format_quantity(mean.value, mean.unit) if mean is not None else ""


def _changes_text(changes: Sequence[HistoryChange]) -> str:
    texts = [f"{change.what}: {', '.join(change.before)} -> {', '.join(change.after)}" for change in changes[:MOST_CHANGES]]
    return "; ".join([*texts, *([f"{len(changes) - MOST_CHANGES} more (--json)"] if len(changes) > MOST_CHANGES else [])])
