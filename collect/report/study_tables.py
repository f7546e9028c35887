"""Redraws the tables of a study from the numbers that it prints. Rows are cells, columns are metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from collect.findings import columns
from collect.findings.row import flatten_cell
from collect.verdicts.reported import ReportedResult

# Keys that name rows only if no other key distinguishes them: studies often put numbers of short and long runs in one row.
LENGTH_KEYS = ("steps", "epochs")
MIN_NUMBERS = 3  # the fewest printed numbers that make a table; fewer numbers are listed one by one
ARGUMENT_KEY = "of"


class ColumnHeading(msgspec.Struct, frozen=True):
    """The heading of a column of a redrawn table."""

    text: str
    """The heading itself."""
    unit: str = ""
    """Small text below it."""
    over: str = ""
    """Small text above it."""
    metric: str = ""
    """The metric of the column, or ""."""


class StudyRow(msgspec.Struct, frozen=True):
    """A row of a redrawn table."""

    names: list[str]
    """For each of `keys` of the table the name of this row, such as `ddp` for the strategy."""
    fields: list[int | None]
    """For each of `heads` of the table the index of a reported entry, or None for an empty field."""


class StudyTable(msgspec.Struct, frozen=True):
    """The numbers that a study prints in one place, such as its table 2."""

    where: str
    """The place in the study."""
    common_values: list[tuple[str, str]]
    """(name, value) of each property that all numbers of the table share."""
    keys: list[str]
    """The headings of the columns that name the rows, such as "Strategy"."""
    heads: list[ColumnHeading]
    """The headings of the columns with numbers."""
    rows: list[StudyRow]
    places: list[int]
    """The indexes of the reported entries in this table."""


class ArrangedTables(msgspec.Struct, frozen=True):
    """All numbers that a study prints, arranged in tables."""

    tables: list[StudyTable]
    """Sorted by their numbers in the study."""
    single: list[int]
    """The indexes of the reported entries that are in no table."""


class Remarks(msgspec.Struct, frozen=True):
    """The footnotes of a table."""

    numbers: dict[int, int]
    """{index of an entry: number of its footnote, starting at 1}."""
    texts: list[str]
    """The footnotes."""
    common: list[str]
    """Texts that apply to all entries of the table."""
    doubts: list[str]
    """Notes on contradictions in the study at the places of these entries."""


# A column of a table: (metric, qualifier). In a table of one metric whose columns are the values of a key
# (`_build_crossed_table`), a column is (value of the key, "").
_Column = tuple[str, str]


class _PlacedEntry(msgspec.Struct, frozen=True):
    """A reported entry (a number that the study prints), while `arrange_reported` looks for its row and column."""

    index: int
    """The index of the entry."""
    cell: dict[str, str]
    """The filter that says which cells the entry is about, as a flat mapping; the argument of the metric is under the key
    ARGUMENT_KEY."""
    column: _Column
    """The column of the entry."""


def arrange_reported(entries: Sequence[ReportedResult]) -> ArrangedTables:
    """Arrange all reported entries (numbers that the study prints) in tables, each entry once.

    The entries of one place of the study form a table. If the place has fewer than MIN_NUMBERS numbers, its entries are not
    put into a table. The text after a comma in a place (`table 4.1.2, effective throughput`) is a qualifier, which names a
    column of the same table.
    """
    groups: dict[str, list[_PlacedEntry]] = {}
    for index, entry in enumerate(entries):
        where, _, qualifier = entry.where.partition(", ")
        cell = {key: columns.format_value(value) for key, value in flatten_cell(entry.cell).items()}
        cell |= {ARGUMENT_KEY: entry.of} if entry.of else {}
        groups.setdefault(where, []).append(_PlacedEntry(index, cell, (entry.metric, qualifier)))
    table_places = sorted((where for where in groups if len(groups[where]) >= MIN_NUMBERS), key=_sort_key)
    single = [placed_entry.index for group in groups.values() if len(group) < MIN_NUMBERS for placed_entry in group]
    return ArrangedTables([_build_table(where, groups[where]) for where in table_places], sorted(single))


def make_footnotes(entries: Sequence[ReportedResult], entry_texts: Sequence[str], indexes: Sequence[int]) -> Remarks:
    """The footnotes of a table. A sentence that applies to several entries is one footnote.

    entries: all reported entries of the study. entry_texts: for each of them, the text about this entry alone, or "". indexes:
    the indexes of the entries in the table."""
    texts = list(dict.fromkeys(entry_texts[index] for index in indexes if entry_texts[index]))
    doubts = list(dict.fromkeys(note for index in indexes for note in entries[index].notes))
    if len(texts) == 1 and len(indexes) > 1 and all(entry_texts[index] for index in indexes):
        return Remarks({}, [], texts, doubts)
    return Remarks({index: texts.index(entry_texts[index]) + 1 for index in indexes if entry_texts[index]}, texts, [], doubts)


def metric_heading(metric: str) -> tuple[str, str]:
    """The heading and the unit of a metric, made from its name: (`Peak memory`, `bytes`) for `peak_memory_bytes`."""
    for suffix, unit in _SUFFIXES.items():
        if metric.endswith(suffix):
            return _capitalise_words(metric.removesuffix(suffix)), unit
    return _capitalise_words(metric), ""


_SUFFIXES = {"_per_s": "per s", "_per_unit_j": "J per unit", "_bytes": "bytes", "_pct": "%", "_ms": "ms", "_s": "s", "_j": "J"}
_ABBREVIATIONS = {"cpu": "CPU", "gpu": "GPU", "mfu": "MFU", "hfu": "HFU", "rss": "RSS"}


def _capitalise_words(name: str) -> str:
    words = [_ABBREVIATIONS.get(word, word) for word in name.split("_")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def _sort_key(where: str) -> tuple[int, list[int]]:
    """The sort key of a place in a study: tables by their numbers, then figures, then sections, then places without a number.

    Places without a number have equal keys, so sorting keeps their order.
    """
    kind = next((rank for rank, word in enumerate(("table", "figure", "section")) if where.lower().startswith(word)), 3)
    return kind, [int(digits) for digits in re.findall(r"\d+", where)] if kind < 3 else []


def _build_table(where: str, entries: Sequence[_PlacedEntry]) -> StudyTable:
    all_keys = list(dict.fromkeys(key for entry in entries for key in entry.cell))
    keys = [key for key in all_keys if len({entry.cell.get(key) for entry in entries}) > 1]
    keys_without_lengths = [key for key in keys if key not in LENGTH_KEYS]
    if len({(_row_names(entry, keys_without_lengths), entry.column) for entry in entries}) == len(entries):
        keys = keys_without_lengths
    common = [
        (columns.make_heading(key), entries[0].cell[key]) for key in all_keys if key not in keys and _is_common(entries, key)
    ]
    table_columns = list(dict.fromkeys(entry.column for entry in entries))
    if len(table_columns) == 1 and (crossed_table := _build_crossed_table(where, common, keys, entries)):
        return crossed_table
    heads = [_column_heading(column) for column in table_columns]
    rows = _build_rows(keys, entries, [entry.column for entry in entries], table_columns)
    if not keys:
        return StudyTable(where, common, ["Metric"], [ColumnHeading("Number")], _stack_numbers(heads, rows), _indexes(entries))
    return StudyTable(where, common, list(map(columns.make_heading, keys)), heads, rows, _indexes(entries))


def _stack_numbers(heads: Sequence[ColumnHeading], rows: Sequence[StudyRow]) -> list[StudyRow]:
    """Arrange the numbers of a single cell below each other, one row for each metric; otherwise the table would have only
    one row."""
    names = [f"{head.text}, {head.unit}" if head.unit else head.text for head in heads]
    fields = [(name, field) for row in rows for name, field in zip(names, row.fields, strict=True) if field is not None]
    return [StudyRow([name], [field]) for name, field in fields]


def _build_crossed_table(
    where: str, common: list[tuple[str, str]], keys: list[str], entries: Sequence[_PlacedEntry]
) -> StudyTable | None:
    """A table of one metric in which each value of the last key is a column, such as one column for each number of GPUs.

    None if there are fewer than two keys, or if a field of the table would be empty or would have two numbers.
    """
    if len(keys) < 2:
        return None
    *row_keys, column_key = keys
    entry_columns = [(entry.cell.get(column_key, ""), "") for entry in entries]
    table_columns = list(dict.fromkeys(entry_columns))
    rows = _build_rows(row_keys, entries, entry_columns, table_columns)
    if any(field is None for row in rows for field in row.fields) or len({tuple(row.names) for row in rows}) < len(rows):
        return None
    head = _column_heading(entries[0].column)
    heads = [ColumnHeading(value, "", columns.make_heading(column_key), head.metric) for value, _ in table_columns]
    return StudyTable(
        where,
        [(head.text, f"in {head.unit}" if head.unit else ""), *common],
        list(map(columns.make_heading, row_keys)),
        heads,
        rows,
        _indexes(entries),
    )


def _build_rows(
    keys: Sequence[str], entries: Sequence[_PlacedEntry], entry_columns: Sequence[_Column], table_columns: Sequence[_Column]
) -> list[StudyRow]:
    """The rows of a table: one row for each combination of names, such as `ddp, gpt2`.

    If two entries have the same names and the same column, the second entry starts another row with the same names.
    entry_columns: the column of each entry. table_columns: the columns of the table, in order."""
    rows: list[tuple[tuple[str, ...], dict[_Column, int]]] = []
    for entry, column in zip(entries, entry_columns, strict=True):
        names = _row_names(entry, keys)
        fields = next((fields for row_names, fields in rows if row_names == names and column not in fields), None)
        if fields is None:
            fields = {}
            rows.append((names, fields))
        fields[column] = entry.index
    return [StudyRow(list(names), [fields.get(column) for column in table_columns]) for names, fields in rows]


def _row_names(entry: _PlacedEntry, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(entry.cell.get(key, "") for key in keys)


def _is_common(entries: Sequence[_PlacedEntry], key: str) -> bool:
    return {entry.cell.get(key) for entry in entries} == {entries[0].cell.get(key)}


def _column_heading(column: _Column) -> ColumnHeading:
    metric, qualifier = column
    text, unit = metric_heading(metric)
    return ColumnHeading(qualifier[:1].upper() + qualifier[1:] or text, unit, "", metric)


def _indexes(entries: Sequence[_PlacedEntry]) -> list[int]:
    return [entry.index for entry in entries]
