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
    "spread": "95 % interval", "n": "n", "ratio": "Ratio", "agrees": "", "says": "Why",
}  # fmt: skip


def title(summary: Summary) -> str:
    """The title of a report: the name of the matrix, and the title of the matrix if it has one."""
    return f"{summary.matrix}: {summary.title}" if summary.title else summary.matrix


def about(summary: Summary) -> list[str]:
    """Sentences that apply to all numbers of a summary: values that all cells share, what ± means, and remarks."""
    shared = ", ".join(f"{what.lower()} {value}" for what, value in summary.table.common)
    spread = f"± is half the 95 % interval of the mean over n repeats; speed-up is relative to {summary.baseline}"
    return [*([f"all cells: {shared}"] if shared else []), spread, *summary.remarks]


def tables(summary: Summary) -> list[TextTable]:
    """The tables of a summary that have rows.

    They are: cells, other measurements, faults on purpose, searches, the score of the planner's predictions, claims, and
    reported numbers.
    """
    table = summary.table
    found = [
        _of_columns("summary", "Cells", table.columns, range(len(summary.rows))),
        *(_of_columns(further.name, further.title, further.columns, further.rows) for further in table.further),
        *fault_text.tables(summary),
        _searches(summary),
        TextTable(
            "predictions", score_text.TITLE, score_text.HEADINGS, score_text.rows(summary.predictions), score_text.NUMBERS
        ),
        _claims(summary),
        _reported(summary),
    ]
    return [one for one in found if one.rows]


def _of_columns(name: str, title: str, shown: Sequence[Column], places: Iterable[int]) -> TextTable:
    """A table with these columns. places: the indexes of the rows of the summary that the table contains."""
    headings = [column.headed for column in shown]
    rows = [[str(column.cells[place]) for column in shown] for place in places]
    return TextTable(name, title, headings, rows, frozenset(place for place, one in enumerate(shown) if one.is_number))


def _searches(summary: Summary) -> TextTable:
    rows = [one.texts for one in summary.searches]
    return TextTable("searches", searches.TITLE, list(searches.HEADINGS), rows, frozenset({2}), frozenset({4}))


def _claims(summary: Summary) -> TextTable:
    told = ". ".join([verdict_text.counts(summary), *verdict_text.cautions(summary)]) if summary.verdicts else ""
    rows = [[one.id, verdict_text.word(one), one.says, one.where, one.why] for one in summary.verdicts]
    return TextTable("claims", told, ["Claim", "Verdict", "What the study says", "Where", "Why"], rows, long=frozenset({2, 4}))


def _reported(summary: Summary) -> TextTable:
    lines: list[ReportedLine] = verdict_text.reported(summary, summary.label_of)
    shared = verdict_text.grouped(verdict_text.common_reasons(summary))
    told = ". ".join([verdict_text.reported_counts(summary), *(f"For all of them: {reason}" for reason in shared)])
    rows = [[str(getattr(line, field)) for field in _REPORTED] for line in lines]
    places = {field: place for place, field in enumerate(_REPORTED)}
    numbers = frozenset(places[field] for field in ("printed", "measured", "n", "ratio"))
    return TextTable("reported", told, list(_REPORTED.values()), rows, numbers, frozenset({places["says"]}))
