"""Redraws the tables of a study from its printed numbers: rows are cells, columns are metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from collect.findings import columns
from collect.findings.row import flat
from collect.verdicts.reported import ReportedResult

LENGTHS = ("steps", "epochs")  # a study sets numbers of its short runs and of its long ones into one row
FEWEST = 3  # numbers that make a table: fewer are told one by one
OF = "of"


class ColumnHeading(msgspec.Struct, frozen=True):
    """A column's heading. over: small text above it; unit: small text below it; metric: the metric of the column, or ""."""

    text: str
    unit: str = ""
    over: str = ""
    metric: str = ""


class StudyRow(msgspec.Struct, frozen=True):
    """names: one for each key of the table; fields: one for each heading, the index of an entry or None."""

    names: list[str]
    fields: list[int | None]


class StudyTable(msgspec.Struct, frozen=True):
    """The numbers of one place of a study. common: (name, value) of what all share; places: the indexes of its entries."""

    where: str
    common: list[tuple[str, str]]
    keys: list[str]
    heads: list[ColumnHeading]
    rows: list[StudyRow]
    places: list[int]


class Redrawn(msgspec.Struct, frozen=True):
    """tables: in the order of their numbers; single: the indexes of the entries that are in no table."""

    tables: list[StudyTable]
    single: list[int]


class Remarks(msgspec.Struct, frozen=True):
    """numbers: maps an entry's index to the number of its footnote, from 1; texts: the footnotes; common: texts that hold for
    all entries.

    doubts: notes on contradictions of the study at the places of these entries.
    """

    numbers: dict[int, int]
    texts: list[str]
    common: list[str]
    doubts: list[str]


_Column = tuple[str, str]  # metric and qualifier; where one metric is crossed, the value that goes across


class _Placed(msgspec.Struct, frozen=True):
    """An entry on its way into a table. cell: its filter, flat, and what its number is of."""

    place: int
    cell: dict[str, str]
    column: _Column


def redraw(entries: Sequence[ReportedResult]) -> Redrawn:
    """Every entry stands once: in the table of its place, or alone where its place prints fewer than FEWEST numbers.

    A place may say more of a number after a comma (`table 4.1.2, effective throughput`): that is a column of the same table.
    """
    groups: dict[str, list[_Placed]] = {}
    for place, entry in enumerate(entries):
        where, _, qualifier = entry.where.partition(", ")
        cell = {key: columns.plain(value) for key, value in flat(entry.cell).items()}
        cell |= {OF: entry.of} if entry.of else {}
        groups.setdefault(where, []).append(_Placed(place, cell, (entry.metric, qualifier)))
    drawn = sorted((where for where in groups if len(groups[where]) >= FEWEST), key=_number)
    single = [placed.place for found in groups.values() if len(found) < FEWEST for placed in found]
    return Redrawn([_table(where, groups[where]) for where in drawn], sorted(single))


def remarks(entries: Sequence[ReportedResult], says: Sequence[str], places: Sequence[int]) -> Remarks:
    """What is said of the entries at these places, each sentence once. says: what is particular to each entry, or nothing."""
    texts = list(dict.fromkeys(says[place] for place in places if says[place]))
    doubts = list(dict.fromkeys(note for place in places for note in entries[place].notes))
    if len(texts) == 1 and len(places) > 1 and all(says[place] for place in places):
        return Remarks({}, [], texts, doubts)
    return Remarks({place: texts.index(says[place]) + 1 for place in places if says[place]}, texts, [], doubts)


def heading(metric: str) -> tuple[str, str]:
    """(`Peak memory`, `bytes`) of `peak_memory_bytes`."""
    for suffix, unit in _SUFFIXES.items():
        if metric.endswith(suffix):
            return _words(metric.removesuffix(suffix)), unit
    return _words(metric), ""


_SUFFIXES = {"_per_s": "per s", "_per_unit_j": "J per unit", "_bytes": "bytes", "_pct": "%", "_ms": "ms", "_s": "s", "_j": "J"}
_ABBREVIATIONS = {"cpu": "CPU", "gpu": "GPU", "mfu": "MFU", "hfu": "HFU", "rss": "RSS"}


def _words(name: str) -> str:
    words = [_ABBREVIATIONS.get(word, word) for word in name.split("_")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def _number(where: str) -> tuple[int, list[int]]:
    """Tables in the order of their numbers, then figures, then sections, then what has a name (sorting keeps their order)."""
    kind = next((rank for rank, word in enumerate(("table", "figure", "section")) if where.lower().startswith(word)), 3)
    return kind, [int(digits) for digits in re.findall(r"\d+", where)] if kind < 3 else []


def _table(where: str, entries: Sequence[_Placed]) -> StudyTable:
    named = list(dict.fromkeys(key for entry in entries for key in entry.cell))
    keys = [key for key in named if len({entry.cell.get(key) for entry in entries}) > 1]
    lasting = [key for key in keys if key not in LENGTHS]
    if len({(_names(entry, lasting), entry.column) for entry in entries}) == len(entries):
        keys = lasting
    common = [(columns.heading(key), entries[0].cell[key]) for key in named if key not in keys and _is_common(entries, key)]
    across = list(dict.fromkeys(entry.column for entry in entries))
    if len(across) == 1 and (crossed := _crossed(where, common, keys, entries)):
        return crossed
    heads = [_head(column) for column in across]
    rows = _rows(keys, entries, [entry.column for entry in entries], across)
    if not keys:
        return StudyTable(where, common, ["Metric"], [ColumnHeading("Number")], _turned(heads, rows), _places(entries))
    return StudyTable(where, common, list(map(columns.heading, keys)), heads, rows, _places(entries))


def _turned(heads: Sequence[ColumnHeading], rows: Sequence[StudyRow]) -> list[StudyRow]:
    """The numbers of one cell, one below the other: across, they would be a table of one row."""
    names = [f"{head.text}, {head.unit}" if head.unit else head.text for head in heads]
    fields = [(name, field) for row in rows for name, field in zip(names, row.fields, strict=True) if field is not None]
    return [StudyRow([name], [field]) for name, field in fields]


def _crossed(where: str, common: list[tuple[str, str]], keys: list[str], entries: Sequence[_Placed]) -> StudyTable | None:
    """One metric over a full grid: the last key goes across, as in `strategy, model | 1 | 2 | 4`."""
    if len(keys) < 2:
        return None
    *down, last = keys
    of = [(entry.cell.get(last, ""), "") for entry in entries]
    across = list(dict.fromkeys(of))
    rows = _rows(down, entries, of, across)
    if any(field is None for row in rows for field in row.fields) or len({tuple(row.names) for row in rows}) < len(rows):
        return None
    head = _head(entries[0].column)
    heads = [ColumnHeading(value, "", columns.heading(last), head.metric) for value, _ in across]
    return StudyTable(
        where,
        [(head.text, f"in {head.unit}" if head.unit else ""), *common],
        list(map(columns.heading, down)),
        heads,
        rows,
        _places(entries),
    )


def _rows(keys: Sequence[str], entries: Sequence[_Placed], of: Sequence[_Column], across: Sequence[_Column]) -> list[StudyRow]:
    """One row for each set of names; a second number for the same field starts another row of the same names."""
    rows: list[tuple[tuple[str, ...], dict[_Column, int]]] = []
    for entry, column in zip(entries, of, strict=True):
        names = _names(entry, keys)
        fields = next((fields for known, fields in rows if known == names and column not in fields), None)
        if fields is None:
            fields = {}
            rows.append((names, fields))
        fields[column] = entry.place
    return [StudyRow(list(names), [fields.get(column) for column in across]) for names, fields in rows]


def _names(entry: _Placed, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(entry.cell.get(key, "") for key in keys)


def _is_common(entries: Sequence[_Placed], key: str) -> bool:
    return {entry.cell.get(key) for entry in entries} == {entries[0].cell.get(key)}


def _head(column: _Column) -> ColumnHeading:
    metric, qualifier = column
    text, unit = heading(metric)
    return ColumnHeading(qualifier[:1].upper() + qualifier[1:] or text, unit, "", metric)


def _places(entries: Sequence[_Placed]) -> list[int]:
    return [entry.place for entry in entries]
