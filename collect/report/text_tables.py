"""Turns a summary into tables of text for the exports, with the same columns and the same rounding as in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collect.findings import searches
from collect.findings.columns import Column
from collect.report import fault_text, score_text, verdict_text
from collect.report.text_table import TextTable
from collect.report.verdict_text import ReportedLine
from collect.summary import Summary

_REPORTED = {
    "where": "Where", "cell": "Cell", "metric": "Metric", "printed": "Reported", "measured": "Measured",
    "spread": "95 % interval", "n": "n", "ratio": "Ratio", "agrees": "", "remarks": "Why",
}  # fmt: skip


def report_title(summary: Summary) -> str:
    """The title of a report: the name of the matrix, and the title of the matrix if it has one."""
    return f"{summary.matrix}: {summary.title}" if summary.title else summary.matrix


def general_remarks(summary: Summary) -> list[str]:
    """Sentences that apply to all numbers of a summary: values that all cells share, what ± means, and remarks."""
    common_values = ", ".join(f"{heading.lower()} {value}" for heading, value in summary.table.common)
    spread = f"± is half the 95 % interval of the mean over n repeats; speed-up is relative to {summary.baseline}"
    return [*([f"all cells: {common_values}"] if common_values else []), spread, *summary.remarks]


def make_text_tables(summary: Summary) -> list[TextTable]:
    """The tables of a summary that have rows.

    They are: cells, other measurements, faults on purpose, searches, the score of the planner's predictions, claims, and
    reported numbers.
    """
    table = summary.table
    candidates = [
        _columns_table("summary", "Cells", table.columns, range(len(summary.rows))),
        *(_columns_table(entry.name, entry.title, entry.columns, entry.rows) for entry in table.further),
        *fault_text.fault_tables(summary),
        _searches_table(summary),
        TextTable(
            "predictions", score_text.TITLE, score_text.HEADINGS, score_text.score_rows(summary.predictions), score_text.NUMBERS
        ),
        _claims_table(summary),
        _reported_table(summary),
    ]
    return [text_table for text_table in candidates if text_table.rows]


def _columns_table(name: str, title: str, columns: Sequence[Column], row_indexes: Iterable[int]) -> TextTable:
    """A table with these columns. row_indexes: the indexes of the rows of the summary that the table contains."""
    headings = [column.heading_with_unit for column in columns]
    rows = [[str(column.cells[index]) for column in columns] for index in row_indexes]
    return TextTable(name, title, headings, rows, frozenset(index for index, entry in enumerate(columns) if entry.is_number))


def _searches_table(summary: Summary) -> TextTable:
    rows = [search.texts for search in summary.searches]
    return TextTable("searches", searches.TITLE, list(searches.HEADINGS), rows, frozenset({2}), frozenset({4}))


def _claims_table(summary: Summary) -> TextTable:
    title = (
        ". ".join([verdict_text.verdict_counts(summary), *verdict_text.verdict_cautions(summary)]) if summary.verdicts else ""
    )
    rows = [[entry.id, verdict_text.verdict_label(entry), entry.says, entry.where, entry.why] for entry in summary.verdicts]
    return TextTable("claims", title, ["Claim", "Verdict", "What the study says", "Where", "Why"], rows, long=frozenset({2, 4}))


def _reported_table(summary: Summary) -> TextTable:
    lines: list[ReportedLine] = verdict_text.reported_lines(summary, summary.labels_by_cell)
    common_reasons = verdict_text.join_assumed_reasons(verdict_text.common_reasons(summary))
    caption = ". ".join([verdict_text.reported_counts(summary), *(f"For all of them: {reason}" for reason in common_reasons)])
    rows = [[str(getattr(line, field)) for field in _REPORTED] for line in lines]
    column_index = {field: index for index, field in enumerate(_REPORTED)}
    numbers = frozenset(column_index[field] for field in ("printed", "measured", "n", "ratio"))
    return TextTable("reported", caption, list(_REPORTED.values()), rows, numbers, frozenset({column_index["remarks"]}))
