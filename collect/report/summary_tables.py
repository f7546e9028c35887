"""Turns a summary into tables, which the terminal, the page and the exports show with the same columns and rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from collect.choices.printed_tables import FilledRow, FilledTable
from collect.findings.answer_section import REPEATS_COLUMN, make_cell_column
from collect.findings.columns import format_value
from collect.findings.equal_losses import LossComparison
from collect.findings.injected_faults import LostWorkerEffect, StragglerEffect
from collect.findings.instrument_cost import InstrumentCost
from collect.findings.prediction_scores import PredictionScore
from collect.findings.searches import SearchResult
from collect.report import choice_text, study_tables, verdict_text
from collect.report.verdict_text import ReportedLine
from collect.summary import Failure, Summary
from collect.verdicts.claims import Verdict
from shardlab.matrix.study import Deviation
from shardlab.terminal import notation
from shardlab.terminal.table import CellText, Column, Table, TextPiece

Row = TypeVar("Row")

FAULTS_TITLE = "Faults on purpose"
FAULTS_NOTE = (
    "These runs are not ordinary runs: one rank was slowed, or its process was ended, because the cell asks for it. "
    "Where the matrix has the same cell without the fault, its value is in brackets."
)
_SLOWED_NOTE = (
    "Throughput by the slowest rank: a step of the run ends when its slowest rank ends it. By each rank's own time: the sum of "
    "ranks' own rates, which a slow rank does not lower if the others do not wait for it. Waiting: how much longer forward, "
    "backward and update take in a step than on the rank where they are shortest. Found: the rank that the timeline names "
    "as the straggler."
)
_LOST_NOTE = (
    "Before and after: units of data (tokens, images) that ranks finished in a second until the rank was lost, and from then "
    "until the first other rank had made all its steps. Not seen: units of the asked steps on which no rank trained. Loss: at "
    "the last step that all ranks made, of the ranks that were left; in brackets at the end of the cell without the fault."
)
MOST_WAITING_RANKS = 8  # the most ranks whose waiting is written
PREDICTIONS_TITLE = "Predictions against measurements, per step"
_SEARCHES_NOTE = (
    "A size is gpu_batch_size: items of a data-parallel rank in a step. Powers of two are tried first, then sizes between "
    "them. Every try is a row of the table of all cells."
)
_PREDICTIONS_NOTE = (
    "Medians over the runs that have a prediction from before their submission. Predicted and measured are blank if these runs "
    "are of several workloads. Ratio: measured over predicted. Error: the mean distance of a measurement from its likely "
    "prediction. In range: runs whose measurement is in the predicted range, or at most 0.1 % outside of it. Memory by "
    "category: what a category holds when the step needs the most memory; a gradient that does not exist yet, or no longer, "
    "counts as 0."
)
_LOSSES_NOTE = (
    "Cells that do the same work in different ways must have the same losses. If their losses differ, they did different work, "
    "and their speeds are not comparable. Another order of additions changes only the last digits of the precision."
)
_INSTRUMENTS_NOTE = (
    "The training time does not include the time that instruments take between steps. Metrics of throughput, step time and "
    "peak memory do not include the steps that an instrument observed."
)
_DEVIATIONS_NOTE = (
    "`jobs plan --adapt` changed the matrix so that it fits the cluster, or `--set` gave another value. All that is not listed "
    "here is as in the original matrix."
)
WINS = {"throughput_per_s": "fastest", "peak_memory_bytes": "least memory"}
AMONG = {"throughput_per_s": "among the fastest", "peak_memory_bytes": "among those with the least memory"}
NO_COMPARISON = "no comparison"


def make_report_title(summary: Summary) -> str:
    """The title of a report: the name of the matrix, and the title of the matrix if it has one."""
    return f"{summary.matrix}: {summary.title}" if summary.title else summary.matrix


def list_general_remarks(summary: Summary) -> list[str]:
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
        *make_fault_tables(summary, summary.labels_by_cell),
        make_searches_table(summary.searches),
        make_score_table(summary.predictions),
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
            "Tries", is_sentence=True,
            pieces=lambda search: list(map(TextPiece, search.texts, search.cells)), separator=" → ",
        ),
    ]  # fmt: skip
    return Table("Searches for a batch size", columns, searches, "searches", note=_SEARCHES_NOTE)


def make_claims_table(summary: Summary) -> Table[Verdict]:
    """The claims of the study with their verdicts."""
    title = ". ".join([verdict_text.count_verdicts(summary), *verdict_text.list_verdict_cautions(summary)])
    columns: list[Column[Verdict]] = [
        Column("Claim", lambda verdict: verdict.id, is_number=False),
        Column("Verdict", verdict_text.label_verdict, is_number=False),
        Column("What the study says", lambda verdict: verdict.says, is_number=False, is_sentence=True),
        Column("Where", lambda verdict: verdict.where, is_number=False),
        Column("Why", lambda verdict: verdict.why, is_number=False, is_sentence=True),
    ]
    styles = [verdict_text.VERDICT_STYLES[verdict.verdict] for verdict in summary.verdicts]
    return Table(title, columns, summary.verdicts, "claims", styles=styles)


def make_reported_table(summary: Summary) -> Table[ReportedLine]:
    """The numbers that the study prints, each beside the measured number."""
    common_reasons = verdict_text.join_assumed_reasons(verdict_text.find_common_reasons(summary))
    title = ". ".join([verdict_text.count_reported(summary), *(f"For all of them: {reason}" for reason in common_reasons)])
    columns: list[Column[ReportedLine]] = [
        Column("Where", lambda line: line.entry.where, is_number=False),
        Column("Cell", lambda line: line.cell, is_number=False),
        Column("Metric", lambda line: line.entry.metric, is_number=False),
        Column("Reported", lambda line: line.printed, is_number=True),
        Column("Measured", lambda line: line.measured, is_number=True),
        Column("95 % interval", lambda line: line.interval, is_number=False),
        Column("n", lambda line: line.entry.n or None, is_number=True),
        Column("Ratio", lambda line: line.ratio, is_number=True),
        Column("", lambda line: line.agreement, is_number=False),
        Column("Why", lambda line: line.remarks, is_number=False, is_sentence=True),
    ]
    return Table(title, columns, verdict_text.make_reported_lines(summary, summary.labels_by_cell), "reported")


def make_section_tables(summary: Summary, labels: Mapping[str, str]) -> dict[str, list[Table[Any]]]:
    """The tables with rows of the sections that consist of tables only, by the name of the section. labels: {id of a cell: its
    label}."""
    tables_by_section: dict[str, list[Table[Any]]] = {
        "deviations": [_make_deviations_table(summary)],
        "failures": [_make_failures_table(summary)],
        "faults": make_fault_tables(summary, labels),
        "instruments": [_make_instruments_table(summary, labels)],
        "losses": [_make_losses_table(summary, labels)],
        "predictions": [make_score_table(summary.predictions)],
        "searches": [make_searches_table(summary.searches)],
        "tables": [_make_printed_table(printed) for printed in summary.tables],
    }
    return {name: [table for table in tables if table.rows] for name, tables in tables_by_section.items()}


def _make_deviations_table(summary: Summary) -> Table[Deviation]:
    columns: list[Column[Deviation]] = [
        Column("What", lambda entry: entry.key),
        Column("Originally", lambda entry: format_value(entry.study) or "none"),
        Column("Here", lambda entry: "left out" if entry.here is None else format_value(entry.here)),
        Column("Cells", lambda entry: entry.cells),
        Column("Why", lambda entry: f"{entry.why}.", is_number=False),
    ]
    return Table("Deviations from the original matrix", columns, summary.deviations, note=_DEVIATIONS_NOTE)


def _make_failures_table(summary: Summary) -> Table[Failure]:
    columns: list[Column[Failure]] = [
        Column("State", lambda failure: failure.state, state=lambda failure: failure.state),
        Column(
            "Run",
            lambda failure: CellText(failure.run, "a later attempt replaced it" if failure.superseded else ""),
            is_number=False,
            is_code=True,
            link=lambda failure: f"{failure.run}/",
        ),
        Column("Why", lambda failure: failure.why, is_number=False),
    ]
    return Table("What did not complete", columns, summary.failures)


def _make_instruments_table(summary: Summary, labels: Mapping[str, str]) -> Table[InstrumentCost]:
    columns: list[Column[InstrumentCost]] = [
        Column("Instrument", lambda cost: cost.instrument),
        Column("Cell", lambda cost: labels[cost.cell], is_number=False, link=lambda cost: cost.cell),
        Column("n", lambda cost: cost.n),
        Column("Between steps", lambda cost: cost.cost_s, "s", digits=2),
        Column("Observed steps", lambda cost: cost.watched_steps or None),
        Column("Their time divided by that of other steps", lambda cost: cost.step_ratio, digits=3),
    ]
    return Table("Cost of the instruments", columns, summary.instruments, note=_INSTRUMENTS_NOTE)


def _make_losses_table(summary: Summary, labels: Mapping[str, str]) -> Table[LossComparison]:
    columns: list[Column[LossComparison]] = [
        Column("What differs", lambda losses: losses.differ),
        Column("Cells", lambda losses: f"{labels[losses.one]} and {labels[losses.other]}", is_number=False),
        Column("Compared steps", lambda losses: losses.steps),
        Column("Largest difference of the losses", lambda losses: losses.max_difference, digits=2),
        Column("Relative to the loss", lambda losses: losses.relative, "%", scale=0.01, digits=2),
        Column("At step", lambda losses: losses.at_step if losses.max_difference else None),
    ]
    return Table("Are the losses the same?", columns, summary.losses, note=_LOSSES_NOTE)


def _make_printed_table(printed: FilledTable) -> Table[FilledRow]:
    """A table of the study that is mostly text: its own columns, the measured values, and the computed choice."""

    def make_text_column(index: int, heading: str) -> Column[FilledRow]:
        return Column(heading, lambda row: row.texts[index], is_number=False)

    def make_measured_column(index: int, metric_name: str) -> Column[FilledRow]:
        def show_estimate(row: FilledRow) -> str:
            return verdict_text.format_quantity(value.value, value.unit) if (value := row.values[index]) else ""

        heading = f"{study_tables.make_metric_heading(metric_name)[0]}, here"
        return Column(heading, show_estimate, is_number=True, name=metric_name, link=lambda row: row.row or "")

    columns = [make_text_column(index, heading) for index, heading in enumerate(printed.columns)]
    columns += [make_measured_column(index, metric_name) for index, metric_name in enumerate(printed.measured)]
    if printed.choice:
        columns.append(Column(
            "Chosen here", lambda row: "; ".join(list_choice_clauses(row)), is_sentence=True,
            pieces=lambda row: [*map(TextPiece, list_choice_clauses(row))], separator="\n",
        ))  # fmt: skip
    return Table(f"{printed.where[:1].upper()}{printed.where[1:]}", columns, printed.rows, note=f"{printed.title}.")


def list_choice_clauses(row: FilledRow) -> list[str]:
    """What the computed choice says about a row, in one clause per criterion; NO_COMPARISON if no comparison has a cell of the
    row."""
    wins = [f"{AMONG[entry.criterion]} in {entry.won} of {entry.of} comparison{'s' * (entry.of != 1)}" for entry in row.wins]
    best_clauses = [
        f"{WINS[entry.criterion]} on {choice_text.name_ranks(entry.ranks)}: {_shorten_names(entry.best)}" for entry in row.best
    ]
    return wins + best_clauses or [NO_COMPARISON]


def _shorten_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def make_score_table(scores: Sequence[PredictionScore]) -> Table[PredictionScore]:
    """The table of scores: one row for each strategy and category."""
    columns: list[Column[PredictionScore]] = [
        Column("Strategy", lambda score: score.strategy, is_number=False),
        Column("Category", lambda score: score.category, is_number=False),
        Column("n", lambda score: score.n),
        Column("Predicted", lambda score: _format_quantity(score.predicted, score.unit), is_number=True),
        Column("Measured", lambda score: _format_quantity(score.measured, score.unit), is_number=True),
        Column("Ratio", lambda score: score.ratio, digits=3),
        Column("Ratio from", lambda score: score.ratio_low, digits=3),
        Column("Ratio to", lambda score: score.ratio_high, digits=3),
        Column("Error", lambda score: score.error_pct, "%", digits=2),
        Column("In range", lambda score: f"{score.within} of {score.n}", is_number=True),
    ]
    return Table(PREDICTIONS_TITLE, columns, scores, "predictions", _PREDICTIONS_NOTE)


def _format_quantity(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    unit_size = 1.0
    if unit == "bytes":
        unit, unit_size = notation.choose_unit([value])
    return f"{notation.format_number(value / unit_size, 3)} {unit}".rstrip()


def make_fault_tables(summary: Summary, labels: Mapping[str, str]) -> list[Table[Any]]:
    """The tables of slowed ranks and of lost workers that have rows. labels: {id of a cell: its label}."""
    slowed_columns: list[Column[StragglerEffect]] = [
        make_cell_column(labels),
        REPEATS_COLUMN,
        Column("Delay of a step", lambda effect: effect.delay_ms, "ms", digits=3),
        Column("Found", lambda effect: "" if effect.found is None else f"rank {effect.found}"),
        _make_compared_column(
            "Throughput by the slowest rank",
            "units/s",
            lambda effect: (effect.throughput_per_s, effect.ordinary_throughput_per_s),
        ),
        _make_compared_column(
            "By each rank's own time",
            "units/s",
            lambda effect: (effect.rank_throughput_per_s, effect.ordinary_rank_throughput_per_s),
        ),
        Column("Waiting of ranks 0, 1, ...", _describe_waiting, "ms", is_number=False),
        _make_compared_column("Staleness, mean", "", lambda effect: (effect.staleness_mean, effect.ordinary_staleness_mean)),
    ]
    lost_columns: list[Column[LostWorkerEffect]] = [
        make_cell_column(labels),
        Column("State", lambda effect: effect.state, state=lambda effect: effect.state),
        REPEATS_COLUMN,
        Column("Before", lambda effect: effect.before_per_s, "units/s"),
        Column("After", lambda effect: effect.after_per_s, "units/s"),
        Column("Not seen", lambda effect: effect.unseen_units, "units"),
        Column("Not seen", lambda effect: effect.unseen_pct, "%", digits=3),
        Column("Last step", lambda effect: effect.last_step),
        _make_compared_column("Loss", "nats", lambda effect: (effect.last_loss, effect.ordinary_loss)),
    ]
    all_tables: list[Table[Any]] = [
        Table("Ranks that were slowed on purpose", slowed_columns, summary.slowed, "slowed", _SLOWED_NOTE),
        Table("Workers that were lost on purpose", lost_columns, summary.lost, "lost", _LOST_NOTE),
    ]
    return [table for table in all_tables if table.rows]


def _describe_waiting(effect: StragglerEffect) -> str:
    waiting_texts = [notation.format_number(ms, 2) for ms in effect.waiting_ms[:MOST_WAITING_RANKS]]
    return ", ".join([*waiting_texts, "..."] if len(effect.waiting_ms) > MOST_WAITING_RANKS else waiting_texts)


def _make_compared_column(
    heading: str, unit: str, get_values: Callable[[Row], tuple[float | None, float | None]]
) -> Column[Row]:
    """A column of values, and in brackets the value of the same cell without the fault. get_values: both values of a row."""

    def make_text(row: Row) -> str:
        fault_value, ordinary_value = get_values(row)
        value_text = "" if fault_value is None else notation.format_number(fault_value)
        return f"{value_text} ({notation.format_number(ordinary_value)})".strip() if ordinary_value is not None else value_text

    return Column(heading, make_text, unit, is_number=True)
