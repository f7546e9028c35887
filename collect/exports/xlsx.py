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

from collect.export import Export, import_package
from collect.findings.row import CellRow, RunRow
from collect.flat_tables import CELL_KEYS
from collect.metric import load_metrics
from collect.reading.load import LoadedMatrix
from collect.report import summary_tables, verdict_text
from collect.summary import Summary
from shardlab.files import files
from shardlab.terminal import printable

WORKBOOK_NAME = "tables.xlsx"
NARROWEST_LETTERS, WIDEST_LETTERS = 8, 60  # widths of columns in characters
Field = str | int | float | bool | None  # None: not known, an empty field


class Sheet(NamedTuple):
    """A sheet: its headings, and the fields of its rows."""

    name: str
    headings: list[str]
    rows: list[list[Field]]


def write_workbook(_loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one workbook with all tables."""
    workbook = import_package("openpyxl").Workbook(write_only=True)
    workbook.properties.creator = "shardlab"
    workbook.properties.created = workbook.properties.modified = datetime.fromtimestamp(summary.created_s, UTC).replace(
        tzinfo=None
    )
    for sheet in make_sheets(summary):
        _add_sheet(workbook, sheet)
    workbook_buffer = io.BytesIO()  # files.write_new names the reason if the disk is full
    workbook.save(workbook_buffer)
    files.write_new(folder / WORKBOOK_NAME, workbook_buffer.getbuffer())


def make_sheets(summary: Summary) -> list[Sheet]:
    """The sheets of the workbook. A table without rows has a sheet with headings only."""
    lines: list[list[Field]] = [
        [text] for text in (summary_tables.make_report_title(summary), *summary_tables.list_general_remarks(summary))
    ]
    return [
        Sheet("about", ["What applies to all numbers"], lines),
        _make_cells_sheet(summary),
        _make_runs_sheet(summary),
        _make_verdicts_sheet(summary),
        _make_reported_sheet(summary),
    ]


def _make_cells_sheet(summary: Summary) -> Sheet:
    label_by_cell = summary.labels_by_cell
    headings = ["cell", "id", *CELL_KEYS, "state", "n", "rehearsal"]
    rows: list[list[Field]] = [
        [label_by_cell[row.id], row.id, *(row.cell[key] for key in CELL_KEYS), row.state, row.n, summary.rehearsal]
        for row in summary.rows
    ]
    for metric in load_metrics():
        estimates = [row.metrics.get(metric.name) for row in summary.rows]
        distinct_units = sorted({estimate.unit for estimate in estimates if estimate})
        distinct_kinds = sorted({estimate.kind for estimate in estimates if estimate and estimate.kind})
        if not any(estimates):
            continue
        metric_heading = _make_metric_heading(metric.name, distinct_units)
        headings += [metric_heading, f"{metric_heading}, low", f"{metric_heading}, high"]
        headings += [f"{metric.name}, unit"] * (len(distinct_units) > 1) + [f"{metric.name}, kind"] * bool(distinct_kinds)
        for row, estimate in zip(rows, estimates, strict=True):
            row += [estimate.value, estimate.low, estimate.high] if estimate else [None] * 3
            row += [estimate.unit if estimate else None] * (len(distinct_units) > 1) + [
                estimate.kind if estimate else None
            ] * bool(distinct_kinds)
    return Sheet("summary", headings, rows)


def _make_metric_heading(metric_name: str, units: Sequence[str]) -> str:
    """The heading of the column of a metric. It has the unit if all rows have the same unit."""
    return f"{metric_name} ({units[0]})" if len(units) == 1 and units[0] else metric_name


def _make_runs_sheet(summary: Summary) -> Sheet:
    labels = summary.labels_by_cell
    row_runs: list[tuple[CellRow, RunRow]] = [(row, run) for row in summary.rows for run in row.runs]
    headings = ["run", "cell", "repeat", "attempt", "state", "why", "rehearsal"]
    rows: list[list[Field]] = [
        [run.run_id, labels[row.id], run.repeat, run.attempt, run.state, run.why, summary.rehearsal] for row, run in row_runs
    ]
    for metric in load_metrics():
        distinct_units = sorted({row.metrics[metric.name].unit for row in summary.rows if metric.name in row.metrics})
        if not distinct_units:
            continue
        headings += [_make_metric_heading(metric.name, distinct_units)]
        headings += [f"{metric.name}, unit"] * (len(distinct_units) > 1)
        for run_fields, (row, run) in zip(rows, row_runs, strict=True):
            is_known = metric.name in run.metrics and metric.name in row.metrics
            run_fields += [run.metrics[metric.name] if is_known else None]
            run_fields += [row.metrics[metric.name].unit if is_known else None] * (len(distinct_units) > 1)
    return Sheet("runs", headings, rows)


def _make_verdicts_sheet(summary: Summary) -> Sheet:
    headings = ["claim", "verdict", "what the study says", "where", "test", "why", "rehearsal", "illustrative"]
    rows: list[list[Field]] = [
        [claim.id, claim.verdict, claim.says, claim.where, claim.test, claim.why, claim.rehearsal, claim.illustrative]
        for claim in summary.verdicts
    ]
    return Sheet("verdicts", headings, rows)


def _make_reported_sheet(summary: Summary) -> Sheet:
    """The numbers of the study beside the measured ones. Each row has its own units, so the units have columns."""
    headings = ["where", "cell", "metric", "of", "printed", "reported", "unit of reported", "measured", "low", "high"]
    headings += ["unit of measured", "state", "n", "measured / reported", "agrees", "kind", "why", "rehearsal"]
    rows: list[list[Field]] = []
    reported_lines = verdict_text.make_reported_lines(summary, summary.labels_by_cell)
    for reported_line in reported_lines:
        entry = reported_line.entry
        is_state = isinstance(entry.measured, str)
        reported = entry.reported
        row: list[Field] = [entry.where, reported_line.cell, entry.metric, entry.of, entry.printed]
        row += [reported.value, reported.unit] if reported and reported.value is not None else [None, None]
        row += [None if is_state else entry.measured, entry.low, entry.high, entry.unit, entry.measured if is_state else None]
        row += [entry.n or None, entry.ratio, reported_line.agreement, entry.kind, reported_line.remarks, summary.rehearsal]
        rows.append(row)
    return Sheet("reported", headings, rows)


def _add_sheet(workbook: Any, sheet: Sheet) -> None:
    """Add a sheet with a frozen row of headings, a frozen first column, and a filter for each column."""
    get_column_letter: Callable[[int], str] = import_package("openpyxl.utils").get_column_letter
    worksheet = workbook.create_sheet(sheet.name)
    worksheet.freeze_panes = "B2"
    worksheet.auto_filter.ref = f"A1:{get_column_letter(len(sheet.headings))}{len(sheet.rows) + 1}"
    for column_index, heading in enumerate(sheet.headings):
        column_texts = [field for row in sheet.rows[:100] if isinstance(field := row[column_index], str)]
        longest_text = max(map(len, [heading, *column_texts]))
        worksheet.column_dimensions[get_column_letter(column_index + 1)].width = min(
            max(longest_text + 3, NARROWEST_LETTERS), WIDEST_LETTERS
        )
    worksheet.append([_make_cell(worksheet, heading, is_heading=True) for heading in sheet.headings])
    for row in sheet.rows:
        worksheet.append([_make_cell(worksheet, field) for field in row])


def _make_cell(worksheet: Any, field: Field, is_heading: bool = False) -> Any:
    """A field as openpyxl writes it. A text is never a formula, also if it begins with = + - or @."""
    if field is None or field == "" or (isinstance(field, float) and not math.isfinite(field)):
        return None
    if not isinstance(field, str):
        return field
    cell = import_package("openpyxl.cell").WriteOnlyCell(worksheet, value=printable.clean_to_one_line(field))
    cell.data_type = "s"
    cell.quotePrefix = True  # a spreadsheet keeps it as text when a reader edits it
    if is_heading:
        cell.font = import_package("openpyxl.styles").Font(bold=True)
    return cell


EXPORT = Export(
    name="xlsx",
    summary="the tables summary, runs, verdicts and reported numbers, as an Excel workbook with a sheet each",
    written_names=frozenset({WORKBOOK_NAME}),
    write=write_workbook,
    package="openpyxl",
)
