"""An answer of traces as a part of the page of a report: its title, its columns, and the tables that show its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from shardlab.terminal.table import Column, Table

AnswerTableMaker = Callable[[Sequence[Any], Mapping[str, str]], list[Table[Any]]]


class AnswerSection(msgspec.Struct, frozen=True):
    """How the page shows the rows of an answer, which are a list in the summary."""

    title: str
    note: str
    """Sentences that define the columns."""
    make_tables: AnswerTableMaker
    """Makes the tables of the rows. Arguments: the rows, which have the attribute `cell`; {id of a cell: its label}."""
    is_folded: bool = False
    """Whether each table is of a single cell, and the page hides it until the reader opens it."""


def make_cell_column(label_by_cell: Mapping[str, str]) -> Column[Any]:
    """The column of the cells of rows, with links to the runs of the cells. label_by_cell: {id of a cell: its label}."""
    return Column("Cell", lambda row: label_by_cell[row.cell], is_number=False, link=lambda row: row.cell)


def make_single_table_maker(*columns: Column[Any], most_rows: int | None = None) -> AnswerTableMaker:
    """Makes one table of all cells. columns: its columns besides the cell. most_rows: the most rows of a cell; None: all."""

    def make_table(rows: Sequence[Any], labels: Mapping[str, str]) -> list[Table[Any]]:
        return [Table("", [make_cell_column(labels), *columns], rows, most_rows=most_rows, group=lambda row: str(row.cell))]

    return make_table


REPEATS_COLUMN: Column[Any] = Column("n", lambda row: row.n)
