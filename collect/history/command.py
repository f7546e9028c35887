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
from collect.reading.load import load
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
    cells: list[CellHistory]  # the cells that have runs
    skipped: list[str]  # a sentence for each matrix that cannot be read


def show(workspace: Workspace, places: Sequence[str], since: str | None, until: str | None, output: Output) -> int:
    """Print the history of all cells of the workspaces and archives. Returns the exit code: 1 if a matrix cannot be read.

    places: folders of workspaces, or archives; empty: `workspace` only. since, until: times in ISO 8601 between which the runs
    were created; None: no limit. Raises InputError if a place has no matrix, or a time cannot be read.
    """
    first, last = _moment(since, "--since"), _moment(until, "--until")
    found: list[HistoryRun] = []
    skipped: list[str] = []
    with contextlib.ExitStack() as opened:
        for place in places or [str(workspace.path)]:
            path = Path(place)
            if not path.exists():
                raise InputError(f"{place}: no such folder or file. Allowed: folders of workspaces, and archives.")
            there = Workspace(path) if path.is_dir() else opened.enter_context(archiving.as_workspace(path))
            if not there.expansions():
                raise InputError(f"{place}: contains no matrix. Allowed: folders of workspaces, and archives.")
            for name in there.expansions():
                try:
                    found += periods.runs_of(place, load(there, name))
                except ShardlabError as error:
                    skipped.append(f"{place}: {name}: {error}")
        found = [one for one in found if (first is None or one.at >= first) and (last is None or one.at <= last)]
        document = History(1, periods.histories(found), skipped)
    _show(output, document)
    output.document(document)
    return int(bool(skipped))


def _moment(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    moment = moments.read_utc(text)
    if moment is None:
        raise InputError(f"{option}: found {text!r}. Allowed: a date or a time in ISO 8601, such as 2031-05-02.")
    return moment


def _show(output: Output, document: History) -> None:
    rows = []
    for history in document.cells:
        for number, period in enumerate(history.periods):
            span = period.first[:10] if period.first[:10] == period.last[:10] else f"{period.first[:10]} to {period.last[:10]}"
            figures = [_figure(period.metrics.get(name)) for name in ("step_time_ms", "throughput_per_s", "train_time_s")]
            slower = period.metrics.get("step_time_ms")
            ratio = f"{slower.ratio:.3f}" if slower is not None and slower.ratio is not None and number else ""
            rows.append(
                [
                    "" if number else history.cell,
                    span,
                    period.place,
                    str(len(period.runs)),
                    *figures,
                    ratio,
                    _in_words(period.changed),
                ]
            )
    if rows:
        output.table("", COLUMNS, rows)
    else:
        output.line("no run completed in this time.")
    if any(one.rehearsals for one in document.cells):
        output.remark("Some runs are rehearsals: their times say nothing about speed.", style="yellow")
    for sentence in document.skipped:
        output.remark(sentence, style="red")


def _figure(figure: HistoryMetric | None) -> str:
    return verdict_text.quantity(figure.value, figure.unit) if figure is not None else ""


def _in_words(changes: Sequence[HistoryChange]) -> str:
    said = [f"{one.what}: {', '.join(one.before)} -> {', '.join(one.after)}" for one in changes[:MOST_CHANGES]]
    return "; ".join([*said, *([f"{len(changes) - MOST_CHANGES} more (--json)"] if len(changes) > MOST_CHANGES else [])])
