"""The tables of `collect trace` that say what to change: advice, time by category and operator, launching calls and streams."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from collect.traces.advice import Advice
from collect.traces.answer_columns import (
    CATEGORY_COLUMNS,
    MOST_ROWS,
    OPERATOR_COLUMNS,
    WORK_COLUMNS,
    ms_column,
    name_column,
    us_column,
)
from collect.traces.operator_times import sum_categories, sum_operators
from collect.traces.rank_analysis import RankAnalysis
from shardlab.terminal.table import Column, Table

_ALL_RANKS = "all ranks together"
_RANK_COLUMN: Column[Any] = Column("Rank", lambda row: row[0].rank)  # of rows that are pairs of a rank and one of its entries


def make_advice_table(advice: Sequence[Advice]) -> Table[Any]:
    """At most three things to change, with an upper bound of the time that each saves."""
    columns: list[Column[Any]] = [
        ms_column("Saves at most", lambda entry: entry.saves_at_most_ns),
        Column("Of the time", lambda entry: entry.share_pct, "%"),
        Column("What to change", lambda entry: entry.text, is_sentence=True, is_number=False),
    ]
    return Table("what to change first: upper bounds, mean over ranks", columns, advice)


def make_categories_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The time by category of work, the longest first."""
    categories = sum_categories(entry for rank in ranks for entry in rank.categories)
    total_ns = sum(entry.total_ns for entry in categories)
    sum_until = dict(
        zip((entry.category for entry in categories), accumulate(entry.total_ns for entry in categories), strict=True)
    )
    columns: list[Column[Any]] = [
        *CATEGORY_COLUMNS,
        ms_column("Time", lambda row: row.total_ns),
        Column("Share", lambda row: 100 * row.total_ns / total_ns if total_ns else None, "%"),
        Column("With those above", lambda row: 100 * sum_until[row.category] / total_ns if total_ns else None, "%"),
    ]
    return Table(f"time of kernels and copies by category (on CPU: of operators), {_ALL_RANKS}", columns, categories)


def make_operator_times_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The operators, the longest own time first."""
    operators = sum_operators(row for rank in ranks for row in rank.operators)
    gpus = {rank.gpu for rank in ranks}
    gpu = gpus.pop() if len(gpus) == 1 else ""
    total_ns = sum(row.time_ns for row in operators)
    columns: list[Column[Any]] = [
        *OPERATOR_COLUMNS,
        ms_column("Own", lambda row: row.time_ns),
        Column("Share", lambda row: 100 * row.time_ns / total_ns if total_ns else None, "%"),
        ms_column("Of it copies", lambda row: row.copy_ns),
        ms_column("With all it calls", lambda row: row.inclusive_ns),
        us_column("Shortest kernel", lambda row: row.shortest_ns),
        us_column("Longest kernel", lambda row: row.longest_ns),
        *WORK_COLUMNS,
        Column("Of the bound", lambda row: row.roofline_pct(gpu), "%"),
        ms_column("Host, self", lambda row: row.self_host_ns),
    ]
    title = f"operators by their own kernels (on CPU: by their own time), {_ALL_RANKS}"
    return Table(title, columns, [row for row in operators if row.time_ns], most_rows=MOST_ROWS)


def make_launch_calls_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The launching calls of each rank, and the call during which the GPU was idle longest."""
    columns: list[Column[Any]] = [
        _RANK_COLUMN,
        Column("Calls", lambda row: row[1].count),
        us_column("Median", lambda row: row[1].median_ns),
        us_column("Longest", lambda row: row[1].longest_ns),
        ms_column("All", lambda row: row[1].total_ns),
        Column("Most idle during", lambda row: row[1].call, is_number=False),
        name_column("Which launches", lambda row: row[1].launched),
        Column("Step", lambda row: row[1].step),
        us_column("Lasts", lambda row: row[1].call_ns),
        us_column("GPU idle during it", lambda row: row[1].idle_ns),
    ]
    return Table("launching calls", columns, [(rank, rank.launch_calls) for rank in ranks if rank.launch_calls])


def make_streams_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The streams of each rank, the busiest first."""
    columns: list[Column[Any]] = [
        _RANK_COLUMN,
        Column("Stream", lambda row: row[1].stream),
        Column("Operations", lambda row: row[1].count),
        ms_column("Busy", lambda row: row[1].busy_ns),
        ms_column("Idle", lambda row: row[1].idle_ns),
        Column("Queue, mean", lambda row: row[1].mean_queue),
        Column("Queue, longest", lambda row: row[1].longest_queue),
    ]
    rows = [(rank, use) for rank in ranks for use in rank.streams]
    return Table("streams, and the queue of launched work that waits", columns, rows, most_rows=MOST_ROWS)


def make_together_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """What runs at the same time on each rank."""
    columns: list[Column[Any]] = [
        _RANK_COLUMN,
        Column("Running", lambda row: row[1].kinds),
        ms_column("Time", lambda row: row[1].total_ns),
        Column("Of the time", lambda row: 100 * row[1].total_ns / row[0].span_ns if row[0].span_ns else None, "%"),
    ]
    return Table("what runs together; the rest is idle", columns, [(rank, use) for rank in ranks for use in rank.together])
