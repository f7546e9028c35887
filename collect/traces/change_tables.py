"""The tables that say what to change, for `collect trace` and for the page of a report: advice, and what the time goes into."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from collect.traces.advice import Saving
from collect.traces.answer_columns import ACHIEVED_FLOPS_COLUMN, MOST_ROWS, make_ms_column, make_name_column, make_us_column
from collect.traces.rank_work import RankWork
from shardlab.terminal.table import Column, Table

ADVICE_COLUMNS: tuple[Column[Any], ...] = (
    make_ms_column("Saves at most", lambda advice: advice.saves_at_most_ns),
    Column("Of the time", lambda advice: advice.share_pct, "%"),
    Column("What to change", lambda advice: advice.text, is_number=False, is_sentence=True),
)
_RANK_COLUMN: Column[Any] = Column("Rank", lambda row: row.rank)


def make_advice_table(savings: Sequence[Saving]) -> Table[Any]:
    """At most three things to change."""
    return Table("what to change first: upper bounds, mean over ranks", ADVICE_COLUMNS, savings)


def make_work_tables(work: RankWork, step_count: int | None = None) -> list[Table[Any]]:
    """What the time goes into: by category and operator, by launching call and stream, and what runs together.

    step_count: the number of steps of all ranks, for values per step and rank; None: values of all ranks and steps together.
    """
    basis_text = "all ranks together" if step_count is None else "per step and rank"
    return [
        _make_categories_table(work, basis_text, step_count or 1),
        _make_operators_table(work, basis_text, step_count or 1),
        _make_launch_calls_table(work),
        _make_streams_table(work),
        _make_together_table(work, basis_text, step_count or 1),
    ]


def _make_categories_table(work: RankWork, basis_text: str, divisor: int) -> Table[Any]:
    category_times_ns = [category_row.total_ns for category_row in work.categories]
    total_ns = sum(category_times_ns) or 1
    sums_ns = dict(zip((category_row.category for category_row in work.categories), accumulate(category_times_ns), strict=True))
    columns: list[Column[Any]] = [
        Column("Category", lambda row: row.category),
        _make_count_column("Count", lambda row: row.count, divisor),
        _make_time_column("Time", lambda row: row.total_ns, divisor),
        Column("Share", lambda row: 100 * row.total_ns / total_ns, "%"),
        Column("With those above", lambda row: 100 * sums_ns[row.category] / total_ns, "%"),
    ]
    return Table(f"time of kernels and copies (on CPU: of operators) by category, {basis_text}", columns, work.categories)


def _make_operators_table(work: RankWork, basis_text: str, divisor: int) -> Table[Any]:
    own_total_ns = sum(row.own_ns for row in work.operators) or 1
    table_columns: list[Column[Any]] = [
        make_name_column("Operator", lambda row: row.operator or f"(no operator) {', '.join(row.kernels)}".rstrip()),
        Column("Category", lambda row: row.category),
        make_name_column("Shapes", lambda row: row.shapes),
        make_name_column("Types", lambda row: ", ".join(name for name in row.types if name and name != "Scalar")),
        _make_count_column("Calls", lambda row: row.calls, divisor),
        _make_time_column("Own", lambda row: row.own_ns, divisor),
        Column("Share", lambda row: 100 * row.own_ns / own_total_ns, "%"),
        _make_time_column("Of it copies", lambda row: row.copy_ns, divisor),
        _make_time_column("With all it calls", lambda row: row.inclusive_ns, divisor),
        ACHIEVED_FLOPS_COLUMN,
        Column("Moved", lambda row: row.bytes_per_s, "TB/s", scale=1e12),
        Column("Of the bound", lambda row: row.roofline_pct, "%"),
        _make_time_column("Host, self", lambda row: row.self_host_ns, divisor),
    ]
    table_title = f"operators by the time of their own kernels and copies (on CPU: by their own time), {basis_text}"
    return Table(table_title, table_columns, [row for row in work.operators if row.own_ns], most_rows=MOST_ROWS)


def _make_launch_calls_table(work: RankWork) -> Table[Any]:
    columns: list[Column[Any]] = [
        _RANK_COLUMN,
        Column("Calls", lambda row: row.count),
        make_us_column("Median", lambda row: row.median_ns),
        make_us_column("Longest", lambda row: row.longest_ns),
        make_ms_column("All", lambda row: row.total_ns),
        Column("Most idle during", lambda row: row.call, is_number=False),
        make_name_column("Which launches", lambda row: row.launched),
        Column("Step", lambda row: row.step),
        make_us_column("Lasts", lambda row: row.call_ns),
        make_us_column("GPU idle during it", lambda row: row.idle_ns),
    ]
    return Table("launching calls of all steps", columns, work.launch_calls, most_rows=MOST_ROWS)


def _make_streams_table(work: RankWork) -> Table[Any]:
    table_columns: list[Column[Any]] = [
        _RANK_COLUMN,
        Column("Stream", lambda row: row.stream),
        Column("Operations", lambda row: row.count),
        make_ms_column("Busy", lambda row: row.busy_ns),
        make_ms_column("Idle", lambda row: row.idle_ns),
        Column("Queue, mean", lambda row: row.mean_queue),
        Column("Queue, longest", lambda row: row.longest_queue),
    ]
    table_title = "streams in all steps, and the queue of launched work that waits"
    return Table(table_title, table_columns, work.streams, most_rows=MOST_ROWS)


def _make_together_table(work: RankWork, basis_text: str, divisor: int) -> Table[Any]:
    columns: list[Column[Any]] = [
        Column("Running", lambda row: row.kinds),
        _make_time_column("Time", lambda row: row.total_ns, divisor),
    ]
    return Table(f"what runs at the same time, {basis_text}", columns, work.together)


def _make_time_column(heading: str, get_ns: Any, divisor: int) -> Column[Any]:
    """A column of times in milliseconds, divided by the number of parts."""
    return Column(heading, get_ns, "ms", scale=1e6 * divisor)


def _make_count_column(heading: str, get_count: Any, divisor: int) -> Column[Any]:
    return Column(heading, get_count, scale=divisor)
