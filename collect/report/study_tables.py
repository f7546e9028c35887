"""Redraws the tables of a study from the numbers that it prints. Rows are cells, columns are metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from collect.findings import columns
from collect.findings.row import flatten_cell
from collect.report.verdict_text import ReportedLine
from shardlab.terminal.table import Column, Table, TextPiece

# Keys that name rows only if no other key distinguishes them: studies often put numbers of short and long runs in one row.
LENGTH_KEYS = ("steps", "epochs")
MIN_NUMBERS = 3  # the fewest printed numbers that make a table; fewer numbers are listed one by one
ARGUMENT_KEY = "of"


class StudyRow(msgspec.Struct, frozen=True):
    """A row of a redrawn table."""

    names: list[str]
    """What the first columns show, such as `ddp` for the strategy."""
    lines: list[ReportedLine | None]
    """The number of each further column; None for an empty field."""


class Footnotes(msgspec.Struct, frozen=True):
    """The footnotes of a table."""

    texts: list[str]
    """The footnotes, numbered from 1."""
    common: list[str]
    """Texts that apply to all numbers of the table."""
    doubts: list[str]
    """Notes on contradictions in the study at the places of these numbers."""


class _Heading(NamedTuple):
    """The heading of a column of numbers."""

    text: str
    unit: str = ""
    """Small text below it."""
    metric: str = ""
    """The metric of the column, or ""."""


# A column of a table: (metric, qualifier). In a table of one metric whose columns are the values of a key
# (`_cross_rows`), a column is (value of the key, "").
_Column = tuple[str, str]


class _PlacedLine(msgspec.Struct, frozen=True):
    """A number that the study prints, while `redraw_tables` looks for its row and column."""

    line: ReportedLine
    cell: dict[str, str]
    """The filter that says which cells the number is about, as a flat mapping; the argument of the metric is under the key
    ARGUMENT_KEY."""
    column: _Column


def redraw_tables(lines: Sequence[ReportedLine]) -> list[tuple[Table[StudyRow], Footnotes]]:
    """Arrange the numbers that a study prints in tables, each number once, sorted by the numbers of the tables in the study.

    The numbers of one place of the study form a table. The places with fewer than MIN_NUMBERS numbers share the last table. The
    text after a comma in a place (`table 4.1.2, effective throughput`) is a qualifier, which names a column of the same table.
    """
    groups: dict[str, list[_PlacedLine]] = {}
    for line in lines:
        where, _, qualifier = line.entry.where.partition(", ")
        cell_filter = {key: columns.format_value(value) for key, value in flatten_cell(line.entry.cell).items()}
        cell_filter |= {ARGUMENT_KEY: line.entry.of} if line.entry.of else {}
        groups.setdefault(where, []).append(_PlacedLine(line, cell_filter, (line.entry.metric, qualifier)))
    table_places = sorted((where for where in groups if len(groups[where]) >= MIN_NUMBERS), key=_make_place_sort_key)
    tables = [_redraw_table(f"study-{number}", where, groups[where]) for number, where in enumerate(table_places, start=1)]
    if single_lines := [line for line in lines if len(groups[line.entry.where.partition(", ")[0]]) < MIN_NUMBERS]:
        table_title = "Numbers in the text of the study" if tables else "Printed numbers"
        single_rows = [StudyRow([_name_metric(line), line.cell, line.entry.where], [line]) for line in single_lines]
        headings = [_Heading("Reported", "measured")]
        tables.append(_make_table("study-text", table_title, "", ["Metric", "Cell", "Where"], headings, single_rows))
    return tables


def make_footnotes(lines: Sequence[ReportedLine]) -> Footnotes:
    """The footnotes of a table with these numbers. A sentence that applies to several numbers is one footnote."""
    footnote_texts = list(dict.fromkeys(line.own_remarks for line in lines if line.own_remarks))
    doubts = list(dict.fromkeys(note for line in lines for note in line.entry.notes))
    is_common = len(footnote_texts) == 1 and len(lines) > 1 and all(line.own_remarks for line in lines)
    return Footnotes([] if is_common else footnote_texts, footnote_texts if is_common else [], doubts)


def make_metric_heading(metric: str) -> tuple[str, str]:
    """The heading and the unit of a metric, made from its name: (`Peak memory`, `bytes`) for `peak_memory_bytes`."""
    for name_suffix, unit in _UNITS.items():
        if metric.endswith(name_suffix):
            return _capitalise_words(metric.removesuffix(name_suffix)), unit
    return _capitalise_words(metric), ""


_UNITS = {"_per_s": "per s", "_per_unit_j": "J per unit", "_bytes": "bytes", "_pct": "%", "_ms": "ms", "_s": "s", "_j": "J"}
_SPELLING_BY_WORD = {"cpu": "CPU", "gpu": "GPU", "mfu": "MFU", "hfu": "HFU", "rss": "RSS"}


def _capitalise_words(name: str) -> str:
    words = [_SPELLING_BY_WORD.get(word, word) for word in name.split("_")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def _name_metric(line: ReportedLine) -> str:
    return ", ".join(filter(None, (make_metric_heading(line.entry.metric)[0], line.entry.of)))


def _make_place_sort_key(where: str) -> tuple[int, list[int]]:
    """The sort key of a place in a study: tables by their numbers, then figures, then sections, then places without a number.

    Places without a number have equal keys, so sorting keeps their order.
    """
    kind_rank = next((rank for rank, word in enumerate(("table", "figure", "section")) if where.lower().startswith(word)), 3)
    return kind_rank, [int(digits) for digits in re.findall(r"\d+", where)] if kind_rank < 3 else []


def _redraw_table(name: str, where: str, placed_lines: Sequence[_PlacedLine]) -> tuple[Table[StudyRow], Footnotes]:
    """The table of the numbers of one place of the study."""
    all_keys = list(dict.fromkeys(key for placed in placed_lines for key in placed.cell))
    row_keys = [key for key in all_keys if len({placed.cell.get(key) for placed in placed_lines}) > 1]
    keys_without_lengths = [key for key in row_keys if key not in LENGTH_KEYS]
    if len({(_list_row_names(placed, keys_without_lengths), placed.column) for placed in placed_lines}) == len(placed_lines):
        row_keys = keys_without_lengths
    first_cell = placed_lines[0].cell
    common_values = [
        f"{columns.make_heading(key)} {first_cell[key]}"
        for key in all_keys
        if key not in row_keys and {placed.cell.get(key) for placed in placed_lines} == {first_cell.get(key)}
    ]
    table_columns = list(dict.fromkeys(placed.column for placed in placed_lines))
    headings = [_make_heading(*column) for column in table_columns]
    name_headings = [columns.make_heading(key) for key in row_keys]
    if len(table_columns) == 1 and (crossed_rows := _cross_rows(row_keys, placed_lines)):
        (metric,), study_rows = headings, crossed_rows
        common_values.insert(0, f"{metric.text} in {metric.unit}" if metric.unit else metric.text)
        column_values = dict.fromkeys(placed.cell.get(row_keys[-1], "") for placed in placed_lines)
        headings = [_Heading(value, name_headings[-1].lower()) for value in column_values]
        del name_headings[-1]
    else:
        study_rows = _build_rows(row_keys, placed_lines, [placed.column for placed in placed_lines], table_columns)
    if not row_keys:  # The numbers of a single cell stand below each other: otherwise the table would have only one row.
        study_rows = [
            StudyRow([", ".join(filter(None, (heading.text, heading.unit)))], [line])
            for row in study_rows
            for heading, line in zip(headings, row.lines, strict=True)
            if line is not None
        ]
        name_headings, headings = ["Metric"], [_Heading("Number")]
    note = ", ".join(text if index == 0 else text[:1].lower() + text[1:] for index, text in enumerate(common_values))
    return _make_table(name, where[:1].upper() + where[1:], note and f"{note}.", name_headings, headings, study_rows)


def _make_table(
    name: str, title: str, note: str, name_headings: Sequence[str], headings: Sequence[_Heading], rows: Sequence[StudyRow]
) -> tuple[Table[StudyRow], Footnotes]:
    """The table of some rows, and its footnotes. name_headings: the headings of the columns that name the rows. headings: those
    of the columns of numbers."""
    footnotes = make_footnotes([line for row in rows for line in row.lines if line])

    def make_name_column(index: int, heading: str) -> Column[StudyRow]:
        return Column(heading, lambda row: row.names[index], is_number=False)

    def make_number_column(index: int, heading: _Heading) -> Column[StudyRow]:
        def make_pieces(row: StudyRow) -> list[TextPiece]:
            line = row.lines[index]
            return _make_field_pieces(line, name, footnotes.texts) if line else []

        return Column(heading.text, unit=heading.unit, name=heading.metric, is_number=True, pieces=make_pieces, separator=" ")

    name_columns = [make_name_column(index, heading) for index, heading in enumerate(name_headings)]
    number_columns = [make_number_column(index, heading) for index, heading in enumerate(headings)]
    return Table(title, [*name_columns, *number_columns], rows, name, note), footnotes


def _make_field_pieces(line: ReportedLine, table_name: str, footnote_texts: Sequence[str]) -> list[TextPiece]:
    """The printed number, and below it the measured number, its interval, whether both agree, their ratio and the footnote."""
    cell, footnote = (
        line.entry.row or "",
        str(footnote_texts.index(line.own_remarks) + 1) if line.own_remarks in footnote_texts else "",
    )
    return [
        TextPiece(line.printed, "" if line.measured else cell, "printed"),
        TextPiece(line.measured, cell) if line.measured else TextPiece("–", spoken="not measured"),
        TextPiece(line.interval and f"({line.interval})"),
        TextPiece({"agrees": "✓", "differs": "≠"}.get(line.agreement, ""), style=line.agreement, spoken=line.agreement),
        TextPiece(line.ratio and f"×{line.ratio}", spoken=f"measured divided by reported: {line.ratio}"),
        TextPiece(footnote, f"#note-{table_name}-{footnote}", "footnote", f"note {footnote}"),
    ]


def _cross_rows(keys: Sequence[str], placed_lines: Sequence[_PlacedLine]) -> list[StudyRow] | None:
    """The rows of a table of one metric in which each value of the last key is a column, such as one column for each number of
    GPUs.

    None if there are fewer than two keys, or if a field of the table would be empty or would have two numbers.
    """
    if len(keys) < 2:
        return None
    *row_keys, column_key = keys
    line_columns = [(placed.cell.get(column_key, ""), "") for placed in placed_lines]
    rows = _build_rows(row_keys, placed_lines, line_columns, list(dict.fromkeys(line_columns)))
    is_full = all(line is not None for row in rows for line in row.lines) and len({tuple(row.names) for row in rows}) == len(
        rows
    )
    return rows if is_full else None


def _build_rows(
    keys: Sequence[str], placed_lines: Sequence[_PlacedLine], line_columns: Sequence[_Column], table_columns: Sequence[_Column]
) -> list[StudyRow]:
    """The rows of a table: one row for each combination of names, such as `ddp, gpt2`.

    If two numbers have the same names and the same column, the second number starts another row with the same names.
    line_columns: the column of each number. table_columns: the columns of the table, in order."""
    rows: list[tuple[tuple[str, ...], dict[_Column, ReportedLine]]] = []
    for placed, column in zip(placed_lines, line_columns, strict=True):
        names = _list_row_names(placed, keys)
        fields = next((fields for row_names, fields in rows if row_names == names and column not in fields), None)
        if fields is None:
            fields = {}
            rows.append((names, fields))
        fields[column] = placed.line
    return [StudyRow(list(names), [fields.get(column) for column in table_columns]) for names, fields in rows]


def _list_row_names(placed: _PlacedLine, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(placed.cell.get(key, "") for key in keys)


def _make_heading(metric: str, qualifier: str) -> _Heading:
    text, unit = make_metric_heading(metric)
    return _Heading(qualifier[:1].upper() + qualifier[1:] or text, unit, metric)
