"""Fills tables of a study that are mostly text: each row is shown beside our measurements and our choice of a strategy."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collect.choices.contest import Contest, make_natural_sort_key
from collect.choices.family import ChoiceFamily
from collect.choices.standing import StandingWord
from collect.findings.row import CellRow
from collect.findings.statistics import Estimate
from shardlab.matrix import cell_names
from shardlab.matrix.study import PrintedTable

# The criteria by which a table shows the best cells. It has no room for more criteria.
TABLE_CRITERIA = ("throughput_per_s", "peak_memory_bytes")
UNORDERED_WORDS: tuple[StandingWord, ...] = ("same work", "equal")  # standings in which no cell is ahead


class ComparisonsWon(msgspec.Struct, frozen=True):
    """How often a cell of a row is among the best, by one criterion."""

    criterion: str
    """Name of a metric."""
    won: int
    """Comparisons in which a cell of the row is the best, or cannot be distinguished from the best."""
    of: int
    """Comparisons in which a cell of the row takes part."""


class BestOfRanks(msgspec.Struct, frozen=True):
    """The best cells by one criterion, in the comparison with the most ranks in which a cell of the row takes part."""

    criterion: str
    """Name of a metric."""
    ranks: int
    """Number of ranks of the comparison."""
    best: list[str]
    """Names of the cells that are the best, or cannot be distinguished from the best."""


class FilledRow(msgspec.Struct):
    """A row of a table of the study, beside our own results."""

    texts: list[str]
    """The texts of the row as the matrix file states them, one for each column."""
    row: str | None
    """The id of the cell, if the row selects one cell."""
    values: list[Estimate | None]
    """The value of each metric in `measured` of the table, in this cell; null: not measured."""
    wins: list[ComparisonsWon] = []
    """Empty unless `choice` of the table is `wins`."""
    best: list[BestOfRanks] = []
    """Empty unless `choice` of the table is `best`."""


class FilledTable(msgspec.Struct):
    """A table of the study that is mostly text, beside our own results."""

    where: str
    """Where the table is in the study, such as `Table 3`."""
    title: str
    """What the table is about."""
    columns: list[str]
    """The headings of the table's columns."""
    measured: list[str]
    """Names of the metrics that are shown beside each row."""
    choice: str | None
    """Shown beside each row: `wins` (how often it is best), `best` (the best cells); null: neither."""
    rows: list[FilledRow]
    """One for each row of the table in the study."""


def fill_tables(tables: Sequence[PrintedTable], rows: Sequence[CellRow], families: Sequence[ChoiceFamily]) -> list[FilledTable]:
    """Fill the tables of a study with measured values and computed choices.

    rows: the rows of the summary of a matrix, one per cell. families: the choices that were computed for this matrix, one
    family per set of cells with the same workload.
    """
    contests = [contest for family in families for contest in family.contests if contest.has_choice]
    return [
        FilledTable(
            table.where,
            table.title,
            table.columns,
            table.measured,
            table.choice,
            [_build_row(table, row.texts, _select_matching_rows(row.cell, rows), contests) for row in table.rows],
        )
        for table in tables
    ]


def _select_matching_rows(cell_filter: dict[str, object], rows: Sequence[CellRow]) -> list[CellRow]:
    return [row for row in rows if cell_names.matches_cell(row.cell, cell_filter)] if cell_filter else []


def _build_row(table: PrintedTable, texts: list[str], matching: Sequence[CellRow], contests: Sequence[Contest]) -> FilledRow:
    matched_row = matching[0] if len(matching) == 1 else None
    values = [matched_row.metrics.get(name) if matched_row else None for name in table.measured]
    filled_row = FilledRow(texts, matched_row.id if matched_row else None, values)
    matching_ids = {row.id for row in matching}
    if table.choice == "wins":
        filled_row.wins = [won for name in TABLE_CRITERIA if (won := _count_wins(name, matching_ids, contests)).of]
    elif table.choice == "best":
        filled_row.best = [best for name in TABLE_CRITERIA if (best := _find_best_of_most_ranks(name, matching_ids, contests))]
    return filled_row


def _count_wins(criterion: str, cell_ids: set[str], contests: Sequence[Contest]) -> ComparisonsWon:
    best_of_contests = [best for contest in contests for best in _find_best_cell_ids(contest, criterion, cell_ids)]
    return ComparisonsWon(criterion, sum(not cell_ids.isdisjoint(best) for best in best_of_contests), len(best_of_contests))


def _find_best_of_most_ranks(criterion: str, cell_ids: set[str], contests: Sequence[Contest]) -> BestOfRanks | None:
    candidates = [(contest, best_ids) for contest in contests for best_ids in _find_best_cell_ids(contest, criterion, cell_ids)]
    if not candidates:
        return None
    contest, best_ids = max(candidates, key=lambda pair: pair[0].ranks)
    name_by_cell = {contender.cell: contender.name for contender in contest.contenders}
    return BestOfRanks(criterion, contest.ranks, sorted((name_by_cell[cell] for cell in best_ids), key=make_natural_sort_key))


def _find_best_cell_ids(contest: Contest, criterion: str, cell_ids: set[str]) -> list[list[str]]:
    """The ids of the best cells of a contest by a criterion, as a list with one element.

    The list is empty if no cell of `cell_ids` is ranked by this criterion, or if no cell of the contest is ahead of the others.
    """
    return [
        standing.best
        for standing in contest.standings
        if standing.criterion == criterion
        and standing.word not in UNORDERED_WORDS
        and not cell_ids.isdisjoint(ranked_cell.cell for ranked_cell in standing.placed)
    ]
