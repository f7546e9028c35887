"""Prints the answer of a summary on one screen: what to choose, how certain that is, the cells, and where the rest is."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from collect.report import choice_text, report_start, terminal, text_tables, verdict_text
from collect.summary import Summary
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.terminal import plain_table
from shardlab.terminal.console import Output
from shardlab.terminal.table import LONGEST_LINE, MOST_NAMED, Table

MOST_LINES = 25  # of the whole output, with the line that names the report
MOST_COLUMNS = 100  # of a sentence; a table may be wider
MOST_ANSWER_LINES = 7
MOST_TITLE_LINES = 2
LAST_LINES = 4  # how to see the rest, and the path of the report


def print_answer(output: Output, summary: Summary, cell_handles: Mapping[str, str]) -> None:
    """Print the choices, what is to be known about them, the table of cells, and how to see the rest: at most MOST_LINES lines
    with the line that names the report.

    cell_handles: as `Workspace.number_cells` returns them.
    """
    width = output.width
    wrapper = textwrap.TextWrapper(min(width or MOST_COLUMNS, MOST_COLUMNS), subsequent_indent="  ", break_on_hyphens=False)
    answer_lines = [line for sentence in _list_choices(summary) for line in wrapper.wrap(sentence)]
    if len(answer_lines) > MOST_ANSWER_LINES:
        answer_lines = [*answer_lines[: MOST_ANSWER_LINES - 1], "  ..."]
    caution_lines = [line for sentence in _list_cautions(summary, cell_handles) for line in wrapper.wrap(sentence)]
    table = terminal.make_cells_table(summary, cell_handles)
    title_lines = wrapper.wrap(table.title)
    if len(title_lines) > MOST_TITLE_LINES:
        title_lines = wrapper.wrap(text_tables.report_title(summary))
    line_count = len(title_lines) + len(answer_lines) + len(caution_lines) + LAST_LINES
    table = _cut_rows(msgspec.structs.replace(table, title=""), MOST_LINES - line_count, width)
    for lines, style in ((title_lines, "bold"), (answer_lines, None), (caution_lines, "yellow")):
        for line in lines:
            output.print_line(line, style=style)
    output.show_table(table)
    for line in wrapper.wrap(_describe_rest(summary, len(table.rows))):
        output.print_line(line)


def _cut_rows(table: Table[Any], most_lines: int, width: int | None) -> Table[Any]:
    """The table with as many rows as a terminal of this width shows in so many lines. width: None for a pipe."""
    heading_lines, row_lines = 1, 1
    if width is not None:
        fitted_table = plain_table.fit_table(table, width)
        hidden_line = fitted_table.describe_hidden(width)
        headings_height = max(heading.count("\n") + 1 for heading in fitted_table.headings)
        heading_lines = headings_height + len(textwrap.wrap(hidden_line, width)) + 2  # a rule; a blank line below the table
        texts = [text for row in fitted_table.texts for text in row]
        row_lines = max((len(text) // LONGEST_LINE + 1 for text in texts if " " in text), default=1)
    return msgspec.structs.replace(table, rows=table.rows[: max((most_lines - heading_lines) // row_lines, 1)])


def _list_choices(summary: Summary) -> Iterator[str]:
    """A sentence for each workload: the best cells by each criterion."""
    choices = report_start.best_choices(summary)
    for choice in choices:
        subject = f"{choice.workload}, {choice.where}" if len(choices) > 1 else choice.where
        texts = [
            f"{heading.lower()}: {text}{f', because of {text.reason}' if text.reason else ''}" for heading, text in choice.best
        ]
        yield f"{subject}: {'; '.join(texts)}."


def _list_cautions(summary: Summary, cell_handles: Mapping[str, str]) -> Iterator[str]:
    """Sentences that limit the answer: a rehearsal, other work, runs that failed, damaged records; and the verdicts on
    claims."""
    yield from [f"{remark}." for remark in summary.remarks if REHEARSAL_NOTE in remark]
    yield from [f"{choice_text.ONCE}."] if choice_text.ONCE in choice_text.choice_cautions(summary) else []
    if other_work := [cell_handles.get(row.id, row.id) for row in summary.rows if row.does_other_work]:
        rest_clause = f" and {len(other_work) - MOST_NAMED} more" if len(other_work) > MOST_NAMED else ""
        yield f"not compared, because they do other work: {', '.join(other_work[:MOST_NAMED])}{rest_clause}."
    if summary.failures:
        states = Counter(failure.state for failure in summary.failures)
        first = summary.failures[0]
        reason = textwrap.shorten(first.why, MOST_COLUMNS, placeholder=" ...")
        counts_text = ", ".join(f"{count} {state}" for state, count in states.items())
        yield f"did not complete: {counts_text}; the first: {first.run}: {reason or first.state}"
    if summary.damage:
        yield f"damaged records: {len(summary.damage)} run(s), {summary.damage[0].run} the first."
    if summary.verdicts:
        yield f"{verdict_text.verdict_counts(summary)}."


def _describe_rest(summary: Summary, row_count: int) -> str:
    """What -v prints besides the answer. row_count: the number of rows that are shown."""
    counts = {
        "more cell(s)": len(summary.rows) - row_count,
        "remark(s)": len(summary.remarks),
        "outlier(s)": len(summary.outliers),
        "printed number(s)": len(summary.reported),
    }
    counts_text = "".join(f"{count} {noun}, " for noun, count in counts.items() if count > 0)
    return f"collect summarize -v also shows {counts_text}times, memory, traffic"
