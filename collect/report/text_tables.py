"""Turns a summary into tables, which the terminal, the page and the exports show with the same columns and rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collect.findings.searches import SearchResult
from collect.report import fault_text, score_text, verdict_text
from collect.report.verdict_text import ReportedLine
from collect.summary import Summary
from collect.verdicts.claims import Verdict
from shardlab.terminal.table import Column, Table

_SEARCHES_NOTE = (
    "A size is gpu_batch_size: items of a data-parallel rank in a step. Powers of two are tried first, then sizes between "
    "them. Every try is a row of the table of all cells."
)


def report_title(summary: Summary) -> str:
    """The title of a report: the name of the matrix, and the title of the matrix if it has one."""
    return f"{summary.matrix}: {summary.title}" if summary.title else summary.matrix


def general_remarks(summary: Summary) -> list[str]:
    """Sentences that apply to all numbers of a summary: values that all cells share, what ± means, and remarks."""
    common_values = ", ".join(f"{heading.lower()} {value}" for heading, value in summary.table.common_values)
    return [*([f"all cells: {common_values}"] if common_values else []), describe_spread(summary), *summary.remarks]


def describe_spread(summary: Summary) -> str:
    """What ± means, and relative to which strategy speed-ups are, if any cell is compared with one of it."""
    baseline_clause = f"; speed-up is relative to {summary.baseline}" if any(row.baseline for row in summary.rows) else ""
    return f"± is half the 95 % interval of the mean over n repeats{baseline_clause}"


def make_text_tables(summary: Summary) -> list[Table[Any]]:
    """The tables of a summary that have rows.

    They are: cells, other measurements, faults on purpose, searches, the score of the planner's predictions, claims, and
    reported numbers.
    """
    candidates = [
        *(summary.table.summary_table, *summary.table.further_tables),
        *fault_text.fault_tables(summary, summary.labels_by_cell),
        make_searches_table(summary.searches),
        score_text.make_score_table(summary.predictions),
        make_claims_table(summary),
        make_reported_table(summary),
    ]
    return [table for table in candidates if table.rows]


def make_searches_table(searches: Sequence[SearchResult]) -> Table[SearchResult]:
    """The searches for a batch size: what each search found, and the sizes that it tried."""
    columns: list[Column[SearchResult]] = [
        Column("Cell", lambda search: search.name, is_number=False),
        Column("Searched", lambda search: search.searched, is_number=False),
        Column("Repeat", lambda search: search.repeat),
        Column("Found", lambda search: search.says, is_number=False),
        Column(
            "Tries", lambda search: search.path, is_number=False, is_sentence=True,
            pieces=lambda search: list(zip(search.texts, search.cells, strict=True)), separator=" → ",
        ),
    ]  # fmt: skip
    return Table("Searches for a batch size", columns, searches, "searches", note=_SEARCHES_NOTE)


def make_claims_table(summary: Summary) -> Table[Verdict]:
    """The claims of the study with their verdicts."""
    title = (
        ". ".join([verdict_text.verdict_counts(summary), *verdict_text.verdict_cautions(summary)]) if summary.verdicts else ""
    )
    columns: list[Column[Verdict]] = [
        Column("Claim", lambda verdict: verdict.id, is_number=False),
        Column("Verdict", verdict_text.verdict_label, is_number=False),
        Column("What the study says", lambda verdict: verdict.says, is_number=False, is_sentence=True),
        Column("Where", lambda verdict: verdict.where, is_number=False),
        Column("Why", lambda verdict: verdict.why, is_number=False, is_sentence=True),
    ]
    styles = [verdict_text.STYLES[verdict.verdict] for verdict in summary.verdicts]
    return Table(title, columns, summary.verdicts, "claims", styles=styles)


def make_reported_table(summary: Summary) -> Table[ReportedLine]:
    """The numbers that the study prints, each beside the measured number."""
    common_reasons = verdict_text.join_assumed_reasons(verdict_text.common_reasons(summary))
    title = ". ".join([verdict_text.reported_counts(summary), *(f"For all of them: {reason}" for reason in common_reasons)])
    columns: list[Column[ReportedLine]] = [
        Column("Where", lambda line: line.where, is_number=False),
        Column("Cell", lambda line: line.cell, is_number=False),
        Column("Metric", lambda line: line.metric, is_number=False),
        Column("Reported", lambda line: line.printed, is_number=True),
        Column("Measured", lambda line: line.measured, is_number=True),
        Column("95 % interval", lambda line: line.spread, is_number=False),
        Column("n", lambda line: line.n, is_number=True),
        Column("Ratio", lambda line: line.ratio, is_number=True),
        Column("", lambda line: line.agrees, is_number=False),
        Column("Why", lambda line: line.remarks, is_number=False, is_sentence=True),
    ]
    return Table(title, columns, verdict_text.reported_lines(summary, summary.labels_by_cell), "reported")
