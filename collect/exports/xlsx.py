"""Exports the tables as an Excel workbook with a sheet for each table: numbers as numbers, units in the headings.

Step records and samples are not in it, because a sheet has at most 1,048,576 rows; the formats csv and parquet have them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from collect.export import Export, package
from collect.findings.row import CellRow, RunRow
from collect.flat_tables import CELL_KEYS
from collect.metric import menu
from collect.reading.load import Loaded
from collect.report import text_tables, verdict_text
from collect.summary import Summary
from shardlab.files import files
from shardlab.terminal import printable

FILE = "tables.xlsx"
NARROWEST, WIDEST = 8, 60  # widths of columns in characters
Field = str | int | float | bool | None  # None: not known, an empty field


class Sheet(NamedTuple):
    """A sheet: its headings, and the fields of its rows."""

    name: str
    headings: list[str]
    rows: list[list[Field]]


def write(_loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    """Write one workbook with all tables."""
    workbook = package("openpyxl").Workbook(write_only=True)
    workbook.properties.creator = "shardlab"
    workbook.properties.created = workbook.properties.modified = datetime.fromtimestamp(summary.created_s, UTC).replace(
        tzinfo=None
    )
    for sheet in sheets(summary):
        _add(workbook, sheet)
    made = io.BytesIO()  # files.write_new names the reason if the disk is full
    workbook.save(made)
    files.write_new(folder / FILE, made.getbuffer())


def sheets(summary: Summary) -> list[Sheet]:
    """The sheets of the workbook. A table without rows has a sheet with headings only."""
    about: list[list[Field]] = [[text] for text in (text_tables.title(summary), *text_tables.about(summary))]
    return [
        Sheet("about", ["What applies to all numbers"], about),
        _cells(summary),
        _runs(summary),
        _verdicts(summary),
        _reported(summary),
    ]


def _cells(summary: Summary) -> Sheet:
    labels = summary.label_of
    headings = ["cell", "id", *CELL_KEYS, "state", "n", "rehearsal"]
    rows: list[list[Field]] = [
        [labels[row.id], row.id, *(row.cell[key] for key in CELL_KEYS), row.state, row.n, summary.rehearsal]
        for row in summary.rows
    ]
    for metric in menu():
        found = [row.metrics.get(metric.name) for row in summary.rows]
        units = sorted({estimate.unit for estimate in found if estimate})
        kinds = sorted({estimate.kind for estimate in found if estimate and estimate.kind})
        if not any(found):
            continue
        name = _heading(metric.name, units)
        headings += [name, f"{name}, low", f"{name}, high"]
        headings += [f"{metric.name}, unit"] * (len(units) > 1) + [f"{metric.name}, kind"] * bool(kinds)
        for row, estimate in zip(rows, found, strict=True):
            row += [estimate.value, estimate.low, estimate.high] if estimate else [None] * 3
            row += [estimate.unit if estimate else None] * (len(units) > 1) + [estimate.kind if estimate else None] * bool(
                kinds
            )
    return Sheet("summary", headings, rows)


def _heading(name: str, units: Sequence[str]) -> str:
    """The heading of the column of a metric. It has the unit if all rows have the same unit."""
    return f"{name} ({units[0]})" if len(units) == 1 and units[0] else name


def _runs(summary: Summary) -> Sheet:
    labels = summary.label_of
    every: list[tuple[CellRow, RunRow]] = [(row, run) for row in summary.rows for run in row.runs]
    headings = ["run", "cell", "repeat", "attempt", "state", "why", "rehearsal"]
    rows: list[list[Field]] = [
        [run.run_id, labels[row.id], run.repeat, run.attempt, run.state, run.why, summary.rehearsal] for row, run in every
    ]
    for metric in menu():
        units = sorted({row.metrics[metric.name].unit for row in summary.rows if metric.name in row.metrics})
        if not units:
            continue
        headings += [_heading(metric.name, units)]
        headings += [f"{metric.name}, unit"] * (len(units) > 1)
        for fields, (row, run) in zip(rows, every, strict=True):
            known = metric.name in run.metrics and metric.name in row.metrics
            fields += [run.metrics[metric.name] if known else None]
            fields += [row.metrics[metric.name].unit if known else None] * (len(units) > 1)
    return Sheet("runs", headings, rows)


def _verdicts(summary: Summary) -> Sheet:
    headings = ["claim", "verdict", "what the study says", "where", "test", "why", "rehearsal", "illustrative"]
    rows: list[list[Field]] = [
        [one.id, one.verdict, one.says, one.where, one.test, one.why, one.rehearsal, one.illustrative]
        for one in summary.verdicts
    ]
    return Sheet("verdicts", headings, rows)


def _reported(summary: Summary) -> Sheet:
    """The numbers of the study beside the measured ones. Each row has its own units, so the units have columns."""
    headings = ["where", "cell", "metric", "of", "printed", "reported", "unit of reported", "measured", "low", "high"]
    headings += ["unit of measured", "state", "n", "measured / reported", "agrees", "kind", "why", "rehearsal"]
    rows: list[list[Field]] = []
    lines = verdict_text.reported(summary, summary.label_of)
    for entry, line in zip(summary.reported, lines, strict=True):
        is_state = isinstance(entry.measured, str)
        printed = entry.reported
        row: list[Field] = [line.where, line.cell, line.metric, line.of, entry.printed]
        row += [printed.value, printed.unit] if printed and printed.value is not None else [None, None]
        row += [None if is_state else entry.measured, entry.low, entry.high, entry.unit, entry.measured if is_state else None]
        row += [entry.n or None, entry.ratio, line.agrees, entry.kind, line.says, summary.rehearsal]
        rows.append(row)
    return Sheet("reported", headings, rows)


def _add(workbook: Any, sheet: Sheet) -> None:
    """Add a sheet with a frozen row of headings, a frozen first column, and a filter for each column."""
    letter: Callable[[int], str] = package("openpyxl.utils").get_column_letter
    made = workbook.create_sheet(sheet.name)
    made.freeze_panes = "B2"
    made.auto_filter.ref = f"A1:{letter(len(sheet.headings))}{len(sheet.rows) + 1}"
    for place, heading in enumerate(sheet.headings):
        texts = [field for row in sheet.rows[:100] if isinstance(field := row[place], str)]
        longest = max(map(len, [heading, *texts]))
        made.column_dimensions[letter(place + 1)].width = min(max(longest + 3, NARROWEST), WIDEST)
    made.append([_cell(made, heading, is_heading=True) for heading in sheet.headings])
    for row in sheet.rows:
        made.append([_cell(made, field) for field in row])


def _cell(sheet: Any, field: Field, is_heading: bool = False) -> Any:
    """A field as openpyxl writes it. A text is never a formula, also if it begins with = + - or @."""
    if field is None or field == "" or (isinstance(field, float) and not math.isfinite(field)):
        return None
    if not isinstance(field, str):
        return field
    made = package("openpyxl.cell").WriteOnlyCell(sheet, value=printable.one_line(field))
    made.data_type = "s"
    made.quotePrefix = True  # a spreadsheet keeps it as text when a reader edits it
    if is_heading:
        made.font = package("openpyxl.styles").Font(bold=True)
    return made


EXPORT = Export(
    name="xlsx",
    summary="the tables summary, runs, verdicts and reported numbers, as an Excel workbook with a sheet each",
    holds=frozenset({FILE}),
    write=write,
    package="openpyxl",
)
