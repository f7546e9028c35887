"""Prints a summary, the verdicts on claims, and the choice of a strategy in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from collect.figures.memory_parts import TensorMemory
from collect.findings import columns
from collect.findings.equal_losses import LossComparison
from collect.findings.instrument_cost import InstrumentCost
from collect.findings.row import CellRow
from collect.report import choice_text, report_start, summary_tables, truncation, verdict_text
from collect.summary import Summary
from shardlab.terminal import notation
from shardlab.terminal.console import Output
from shardlab.terminal.table import Table
from shardlab.workspace import handles


def print_summary(output: Output, summary: Summary, tensors: Mapping[str, TensorMemory]) -> None:
    """Print the table of cells, then all other parts of a summary: choices, claims, failures, damaged records and more.

    tensors: as for `report_start.list_best_choices`."""
    labels = summary.labels_by_cell
    cells_table = make_cells_table(summary)
    further_tables = columns.make_cell_tables(summary.rows, truncation.truncate_summary(summary).rows).further_tables
    summary = truncation.truncate_summary(summary)
    output.show_table(cells_table)
    for other_table in further_tables:
        _show_further(output, other_table)
    _show_further(output, summary_tables.make_searches_table(summary.searches))
    output.print_line(f"{summary_tables.describe_spread(summary)}.")
    for remark in summary.remarks:
        output.print_line(remark, style="yellow")
    print_choices(output, summary, tensors)
    print_claims(output, summary)
    if summary.reported:
        output.print_line(f"{verdict_text.count_reported(summary)} (see the report, or: collect verdicts)")
    for loss_comparison in summary.losses:
        output.print_line(describe_losses(loss_comparison, labels))
    for instrument_cost in summary.instruments:
        output.print_line(describe_instrument_cost(instrument_cost, labels))
    for other_table in (
        *summary_tables.make_fault_tables(summary, labels),
        summary_tables.make_score_table(summary.predictions),
    ):
        _show_further(output, other_table)
    for failure in summary.failures:
        text = f"{failure.run}{' (tried again)' if failure.superseded else ''}{': ' + failure.why if failure.why else ''}"
        output.print_line(f"{failure.state}: {text}", columns.STYLE_BY_STATE.get(failure.state))
    for outlier in summary.outliers:
        value_texts = f"{notation.format_number(outlier.value)}, the median is {notation.format_number(outlier.median)}"
        output.print_line(f"outlier, not removed: {outlier.run}: {outlier.metric} {value_texts}", style="yellow")
    for damage in summary.damage:
        output.print_line(f"damaged records: {damage.run}: {damage.says}", style="yellow")


def make_cells_table(summary: Summary) -> Table[CellRow]:
    """The table of the cells of a summary. Its title has the values that all cells share."""
    cell_tables = columns.make_cell_tables(summary.rows, truncation.truncate_summary(summary).rows)
    common_values = ", ".join(f"{heading.lower()} {value}" for heading, value in cell_tables.common_values)
    title = f"{summary_tables.make_report_title(summary)}{f' ({common_values})' if common_values else ''}"
    shown_columns = [handles.make_handle_column(lambda row: row.handle), *cell_tables.summary_table.columns]
    return msgspec.structs.replace(cell_tables.summary_table, title=title, columns=shown_columns)


def print_choices(output: Output, summary: Summary, tensors: Mapping[str, TensorMemory]) -> None:
    """Print which strategy to choose, with one row for each number of ranks and batch size. tensors: as for `print_summary`.

    Prints nothing if the matrix has no cells that can be compared.
    """
    families = choice_text.select_shown_families(summary)
    if not families:
        return
    criteria = choice_text.find_differing_criteria(families)
    for choice_family in families:
        choice_table = choice_text.make_choice_table([choice_family], criteria, tensors)
        title = f"which strategy to choose: {choice_text.make_family_title(choice_family)}"
        output.show_table(msgspec.structs.replace(choice_table, title=title, columns=choice_table.columns[: 1 + len(criteria)]))
    for best_choice in report_start.list_best_choices(summary, tensors):
        for heading, text in best_choice.best:
            if text.reason:
                output.print_line(f"{heading.lower()}, {best_choice.where}: {text.names[0].text}, because of {text.reason}.")
    if hidden_note := choice_text.write_hidden_note(summary):
        output.print_line(hidden_note)
    for caution in choice_text.list_choice_cautions(summary):
        output.print_line(caution, style="yellow")


def print_claims(output: Output, summary: Summary) -> None:
    """Print one row for each claim of the study, with its verdict. Prints nothing if the study has no claims."""
    if not summary.verdicts:
        return
    claims = summary_tables.make_claims_table(summary)
    output.show_table(msgspec.structs.replace(claims, title=verdict_text.count_verdicts(summary), columns=claims.columns[:3]))
    for caution in verdict_text.list_verdict_cautions(summary):
        output.print_line(caution, style="yellow")


def print_verdicts(output: Output, summary: Summary) -> None:
    """Print each claim of a study with the numbers of its test, and each number that the study prints with the measured
    number."""
    for remark in summary.remarks:
        output.print_line(remark, style="yellow")
    if not summary.verdicts and not summary.reported:
        output.print_line(f"{summary.matrix}: states no claims and no reported numbers.")
    print_claims(output, summary)
    for verdict in summary.verdicts:
        output.print_line(
            f"{verdict.id}: {verdict_text.label_verdict(verdict)}: {verdict.why}", verdict_text.VERDICT_STYLES[verdict.verdict]
        )
        for number_or_remark in (*map(verdict_text.describe_claim_number, verdict.numbers), *verdict.remarks):
            output.print_line(f"  {number_or_remark}")
        for reason in verdict_text.join_assumed_reasons(verdict.reasons):
            output.print_line(f"  likely: {reason}")
        for note in verdict.notes if verdict.verdict == "contradicted" else ():
            output.print_line(f"  note on the same place in the study: {note}")
    if summary.reported:
        reported = summary_tables.make_reported_table(summary)
        output.show_table(msgspec.structs.replace(reported, title=verdict_text.count_reported(summary)))
        if verdict_text.uses_pooled_noise(summary):
            output.print_line("intervals of fewer than three repeats are from the noise of all repeated cells of this matrix")
        for reason in verdict_text.join_assumed_reasons(verdict_text.find_common_reasons(summary)):
            output.print_line(f"for all of them: {reason}")


def _show_further(output: Output, table: Table[Any]) -> None:
    if table.rows:
        output.show_table(msgspec.structs.replace(table, title=table.title.lower()))


def describe_losses(comparison: LossComparison, labels: Mapping[str, str]) -> str:
    """A sentence that compares the losses of two cells. labels: {id of a cell: its label}."""
    subject = "both launchers" if comparison.differ == "launcher" else "both strategies"
    pair_text = f"{labels[comparison.one]} and {labels[comparison.other]}"
    if comparison.max_difference is None:
        return f"losses of {subject}: no step in common: {pair_text}"
    if comparison.max_difference == 0:
        return f"same losses with {subject}: no difference in {comparison.steps} steps: {pair_text}"
    difference_text = notation.format_number(comparison.max_difference, 2)
    relative_clause = f" ({notation.format_number(100 * comparison.relative, 2)} % of the loss)" if comparison.relative else ""
    return f"losses of {subject}: max difference {difference_text}{relative_clause} in {comparison.steps} steps: {pair_text}"


def describe_instrument_cost(cost: InstrumentCost, labels: Mapping[str, str]) -> str:
    """A sentence about the time that an instrument cost in a cell. labels: {id of a cell: its label}."""
    sentence = f"instrument {cost.instrument}: {notation.format_number(cost.cost_s, 2)} s between steps"
    if cost.watched_steps:
        sentence += f", {cost.watched_steps} step{'s' if cost.watched_steps > 1 else ''} observed and not counted"
    if cost.step_ratio is not None:
        sentence += f" ({notation.format_number(cost.step_ratio, 3)} times as long as the others)"
    return f"{sentence}: {labels[cost.cell]}"
