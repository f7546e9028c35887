"""Makes the text of the columns that are added to a table of the study: measured values, and the computed choice."""

from __future__ import annotations

from collections.abc import Sequence

from collect.choices.printed_tables import FilledRow, FilledTable
from collect.findings.statistics import Estimate
from collect.report import study_tables, verdict_text

CHOICE_HEADING = "Chosen here"
WINS = {"throughput_per_s": "fastest", "peak_memory_bytes": "least memory"}
AMONG = {"throughput_per_s": "among the fastest", "peak_memory_bytes": "among those with the least memory"}
NONE = "no comparison"


def added_headings(table: FilledTable) -> list[tuple[str, str]]:
    """The columns that are added to a table: (heading, name of the metric, or "" if the column is the computed choice)."""
    added_columns = [(f"{study_tables.metric_heading(name)[0]}, here", name) for name in table.measured]
    return [*added_columns, (CHOICE_HEADING, "")] if table.choice else added_columns


def measured_text(estimate: Estimate | None) -> str:
    """A measured value with its unit; "" if it is not known."""
    return verdict_text.format_quantity(estimate.value, estimate.unit) if estimate else ""


def choice_clauses(row: FilledRow) -> list[str]:
    """What the computed choice says about a row, in one clause per criterion; NONE if no comparison has a cell of the row."""
    wins = [f"{AMONG[entry.criterion]} in {entry.won} of {entry.of} {_comparison_noun(entry.of)}" for entry in row.wins]
    best = [f"{WINS[entry.criterion]} on {_ranks_text(entry.ranks)}: {_shorten_names(entry.best)}" for entry in row.best]
    return wins + best or [NONE]


def _comparison_noun(count: int) -> str:
    return "comparison" if count == 1 else "comparisons"


def _ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _shorten_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
