"""The tables of the sections of the page that consist of tables alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collect.choices.printed_tables import FilledRow, FilledTable
from collect.findings.equal_losses import LossComparison
from collect.findings.instrument_cost import InstrumentCost
from collect.report import choice_text, fault_text, score_text, study_tables, text_tables, verdict_text
from collect.summary import Failure, Summary
from shardlab.matrix.study import Deviation
from shardlab.terminal.table import CellText, Column, Table

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


def make_section_tables(summary: Summary, labels: Mapping[str, str]) -> dict[str, list[Table[Any]]]:
    """The tables of the sections that consist of tables only, by the name of the section. labels: {id of a cell: its label}."""
    return {
        "deviations": [_make_deviations_table(summary)],
        "failures": [_make_failures_table(summary)],
        "faults": fault_text.fault_tables(summary, labels),
        "instruments": [_make_instruments_table(summary, labels)],
        "losses": [_make_losses_table(summary, labels)],
        "predictions": [score_text.make_score_table(summary.predictions)],
        "searches": [text_tables.make_searches_table(summary.searches)],
        "tables": [_make_printed_table(printed) for printed in summary.tables],
    }


def _make_deviations_table(summary: Summary) -> Table[Deviation]:
    columns: list[Column[Deviation]] = [
        Column("What", lambda entry: entry.key),
        Column("Originally", lambda entry: verdict_text.value_text(entry.study)),
        Column("Here", lambda entry: "left out" if entry.here is None else verdict_text.value_text(entry.here)),
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

    def make_measured_column(index: int, name: str) -> Column[FilledRow]:
        def show_estimate(row: FilledRow) -> str:
            return verdict_text.format_quantity(value.value, value.unit) if (value := row.values[index]) else ""

        heading = f"{study_tables.metric_heading(name)[0]}, here"
        return Column(heading, show_estimate, is_number=True, name=name, link=lambda row: row.row or "")

    columns = [make_text_column(index, heading) for index, heading in enumerate(printed.columns)]
    columns += [make_measured_column(index, name) for index, name in enumerate(printed.measured)]
    if printed.choice:
        columns.append(Column(
            "Chosen here", lambda row: "; ".join(choice_clauses(row)), is_number=False, is_sentence=True,
            pieces=lambda row: [(clause, "") for clause in choice_clauses(row)], separator="\n",
        ))  # fmt: skip
    return Table(f"{printed.where[:1].upper()}{printed.where[1:]}", columns, printed.rows, note=f"{printed.title}.")


def choice_clauses(row: FilledRow) -> list[str]:
    """What the computed choice says about a row, in one clause per criterion; NO_COMPARISON if no comparison has a cell of the
    row."""
    wins = [f"{AMONG[entry.criterion]} in {entry.won} of {entry.of} comparison{'s' * (entry.of != 1)}" for entry in row.wins]
    best = [
        f"{WINS[entry.criterion]} on {choice_text.ranks_text(entry.ranks)}: {_shorten_names(entry.best)}" for entry in row.best
    ]
    return wins + best or [NO_COMPARISON]


def _shorten_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
