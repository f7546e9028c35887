"""Prints the answer of a summary on one screen: what to choose, how certain that is, the cells, and where the rest is."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from collect.figures.memory_parts import TensorMemory
from collect.findings import columns
from collect.report import choice_text, report_start, terminal, verdict_text
from collect.report.choice_text import ChoiceText
from collect.summary import SYNTHETIC, Summary
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.terminal import plain_table
from shardlab.terminal.console import Output
from shardlab.terminal.table import LONGEST_LINE, Table

MOST_LINES = 25  # of the whole output, with the line that names the report
MOST_COLUMNS = 100  # of a sentence; a table may be wider
MOST_TITLE_LINES = 2
MOST_ANSWER_LINES = 7
MOST_CAUTION_LINES = 3  # and those that the answer does not need
LARGEST_EQUAL_LOSS = 1e-3  # a larger relative difference of losses is named
LAST_LINES = 4  # what ± is, how to see the rest, and the path of the report, which may need two lines


def print_answer(output: Output, summary: Summary, tensors: Mapping[str, TensorMemory]) -> None:
    """Print the choices, what is to be known about them, the table of cells, and how to see the rest: at most MOST_LINES lines
    with the line that names the report.

    tensors: as `report_start.list_best_choices` takes them.
    """
    width = output.width

    def wrap(sentences: Iterable[str], most_lines: int) -> list[str]:
        """The lines of sentences on a terminal; in a pipe, a line is a sentence."""
        text_lines = [*sentences]
        if width is not None:
            text_width = min(width, MOST_COLUMNS)
            text_lines = [line for text in text_lines for line in textwrap.wrap(text, text_width, subsequent_indent="  ")]
        return text_lines if len(text_lines) <= most_lines else [*text_lines[: most_lines - 1], "  ..."]

    answer_lines = wrap(_list_choices(summary, tensors), MOST_ANSWER_LINES)
    caution_lines = wrap(_list_cautions(summary), MOST_ANSWER_LINES + MOST_CAUTION_LINES - len(answer_lines))
    cells_table = terminal.make_cells_table(summary)
    title_lines = wrap([cells_table.title], MOST_TITLE_LINES)
    line_count = len(title_lines) + len(answer_lines) + len(caution_lines) + LAST_LINES
    cells_table = _cut_rows(msgspec.structs.replace(cells_table, title=""), MOST_LINES - line_count, width)
    for text_lines, line_style in ((title_lines, "bold"), (answer_lines, None), (caution_lines, "yellow")):
        for line in text_lines:
            output.print_line(line, style=line_style)
    output.show_table(cells_table)
    hidden_count = len(summary.rows) - len(cells_table.rows)
    cells_text = f"{hidden_count} more cell(s), " if hidden_count else ""
    output.print_line("±: half the 95 % interval of the mean over n repeats")
    output.print_line(f"collect summarize -v: {cells_text}{len(summary.remarks)} remark(s), times, memory, traffic")


def _cut_rows(table: Table[Any], most_lines: int, width: int | None) -> Table[Any]:
    """The table with as many rows as a terminal of this width shows in so many lines; all rows in a pipe (width None)."""
    if width is None:
        return table
    fitted_table = plain_table.fit_table(table, width)
    hidden_line = fitted_table.describe_hidden(width)
    headings_height = max(heading.count("\n") + 1 for heading in fitted_table.headings)
    heading_lines = headings_height + len(textwrap.wrap(hidden_line, width)) + 2  # a rule; a blank line below the table
    cell_texts = [text for row in fitted_table.texts for text in row]
    lines_per_row = max((len(text) // LONGEST_LINE + 1 for text in cell_texts if " " in text), default=1)
    return msgspec.structs.replace(table, rows=table.rows[: max((most_lines - heading_lines) // lines_per_row, 1)])


def _list_choices(summary: Summary, tensors: Mapping[str, TensorMemory]) -> Iterator[str]:
    """The counts of the verdicts on claims; then a sentence for each workload: the best cells by each criterion."""
    workload_choices = report_start.list_best_choices(summary, tensors)
    if summary.verdicts:
        yield f"{verdict_text.count_verdicts(summary)}."
    yield from report_start.describe_fastest_commands(summary)
    common_batch = dict(summary.table.common_values).get(columns.make_heading("global_batch_size"))
    for choice in workload_choices:
        contest_name = choice.where.removesuffix(f", batch {common_batch}")
        choice_subject = f"{choice.workload}, {contest_name}" if len(workload_choices) > 1 else contest_name
        choice_texts = [_shorten_choice(heading, text) for heading, text in choice.best if text.names or text.value]
        yield f"{choice_subject}: {'; '.join(choice_texts)}."


def _shorten_choice(heading: str, best_text: ChoiceText) -> str:
    """The best cells by one criterion in few words, such as `fastest: ddp 4,992 tokens/s`; the report has all words."""
    criterion_name = heading.lower().split(" per ")[0]
    if best_text.remark.startswith("tensors"):  # on a CPU, where the table has the memory of whole processes
        criterion_name += " (tensors)"
    is_undecided = best_text.names and best_text.remark == "cannot be distinguished"
    reason_clause = f", because of {best_text.reason}" if best_text.reason else ""
    shown_words = [", ".join(link.text for link in best_text.names), "(undecided)" if is_undecided else best_text.value]
    return f"{criterion_name}: {' '.join(filter(None, shown_words))}{reason_clause}"


def _list_cautions(summary: Summary) -> Iterator[str]:
    """Sentences that limit the answer: runs that failed, remarks, damaged records, outliers."""
    expected_states = {row.id: row.cell.get("expect") or () for row in summary.rows}
    unexpected_failures = (entry for entry in summary.failures if entry.state not in expected_states.get(entry.cell, ()))
    counted_failures = [entry for entry in unexpected_failures if not entry.superseded]
    if counted_failures:
        count_by_state, first_failure = Counter(failure.state for failure in counted_failures), counted_failures[0]
        counts_text = ", ".join(f"{count} {state}" for state, count in count_by_state.items())
        reason = first_failure.why if len(first_failure.why) <= MOST_COLUMNS else f"{first_failure.why[: MOST_COLUMNS - 1]}…"
        yield f"did not complete: {counts_text}; the first: {first_failure.run}: {reason or first_failure.state}"
    marks = [remark for remark in summary.remarks if REHEARSAL_NOTE in remark or remark.startswith(SYNTHETIC.split("{")[0])]
    yield from marks
    if summary.damage:
        yield f"damaged records of {len(summary.damage)} run(s); the first: {summary.damage[0].run}: {summary.damage[0].says}"
    largest = max((entry for entry in summary.losses if entry.relative), key=lambda entry: entry.relative or 0, default=None)
    if largest is not None and (largest.relative or 0) > LARGEST_EQUAL_LOSS:
        yield terminal.describe_losses(largest, summary.labels_by_cell)
    if summary.outliers:
        yield f"{len(summary.outliers)} outlier(s), not removed: repeats far from the others of their cells"
    yield from [remark for remark in summary.remarks if remark not in marks]
    yield from [caution for caution in choice_text.list_choice_cautions(summary) if caution != choice_text.REHEARSAL_CAUTION]
