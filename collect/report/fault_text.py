"""Writes what faults on purpose did, as two tables for the terminal, the page and the exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from collect.findings.answer_section import REPEATS_COLUMN, make_cell_column
from collect.findings.injected_faults import LostWorkerEffect, StragglerEffect
from collect.summary import Summary
from shardlab.terminal import notation
from shardlab.terminal.table import Column, Table

Row = TypeVar("Row")

TITLE = "Faults on purpose"
NOTE = (
    "These runs are not ordinary runs: one rank was slowed, or its process was ended, because the cell asks for it. "
    "Where the matrix has the same cell without the fault, its value is in brackets."
)
SLOWED_NOTE = (
    "Throughput by the slowest rank: a step of the run ends when its slowest rank ends it. By each rank's own time: the sum of "
    "ranks' own rates, which a slow rank does not lower if the others do not wait for it. Waiting: how much longer forward, "
    "backward and update take in a step than on the rank where they are shortest. Found: the rank that the timeline names "
    "as the straggler."
)
LOST_NOTE = (
    "Before and after: units of data (tokens, images) that ranks finished in a second until the rank was lost, and from then "
    "until the first other rank had made all its steps. Not seen: units of the asked steps on which no rank trained. Loss: at "
    "the last step that all ranks made, of the ranks that were left; in brackets at the end of the cell without the fault."
)
MOST_RANKS = 8  # the most ranks whose waiting is written


def fault_tables(summary: Summary, labels: Mapping[str, str]) -> list[Table[Any]]:
    """The tables of slowed ranks and of lost workers that have rows. labels: {id of a cell: its label}."""
    slowed: list[Column[StragglerEffect]] = [
        make_cell_column(labels),
        REPEATS_COLUMN,
        Column("Delay of a step", lambda effect: effect.delay_ms, "ms", digits=3),
        Column("Found", lambda effect: "" if effect.found is None else f"rank {effect.found}"),
        _compared_column(
            "Throughput by the slowest rank",
            "units/s",
            lambda effect: (effect.throughput_per_s, effect.ordinary_throughput_per_s),
        ),
        _compared_column(
            "By each rank's own time",
            "units/s",
            lambda effect: (effect.rank_throughput_per_s, effect.ordinary_rank_throughput_per_s),
        ),
        Column("Waiting of ranks 0, 1, ...", _waiting_text, "ms", is_number=False),
        _compared_column("Staleness, mean", "", lambda effect: (effect.staleness_mean, effect.ordinary_staleness_mean)),
    ]
    lost: list[Column[LostWorkerEffect]] = [
        make_cell_column(labels),
        Column("State", lambda effect: effect.state, state=lambda effect: effect.state),
        REPEATS_COLUMN,
        Column("Before", lambda effect: effect.before_per_s, "units/s"),
        Column("After", lambda effect: effect.after_per_s, "units/s"),
        Column("Not seen", lambda effect: effect.unseen_units, "units"),
        Column("Not seen", lambda effect: effect.unseen_pct, "%", digits=3),
        Column("Last step", lambda effect: effect.last_step),
        _compared_column("Loss", "nats", lambda effect: (effect.last_loss, effect.ordinary_loss)),
    ]
    all_tables: list[Table[Any]] = [
        Table("Ranks that were slowed on purpose", slowed, summary.slowed, "slowed", SLOWED_NOTE),
        Table("Workers that were lost on purpose", lost, summary.lost, "lost", LOST_NOTE),
    ]
    return [table for table in all_tables if table.rows]


def _waiting_text(effect: StragglerEffect) -> str:
    waiting_texts = [notation.format_number(ms, 2) for ms in effect.waiting_ms[:MOST_RANKS]]
    return ", ".join([*waiting_texts, "..."] if len(effect.waiting_ms) > MOST_RANKS else waiting_texts)


def _compared_column(heading: str, unit: str, get_values: Callable[[Row], tuple[float | None, float | None]]) -> Column[Row]:
    """A column of values, and in brackets the value of the same cell without the fault. get_values: both values of a row."""

    def make_text(row: Row) -> str:
        value, ordinary = get_values(row)
        text = "" if value is None else notation.format_number(value)
        return f"{text} ({notation.format_number(ordinary)})".strip() if ordinary is not None else text

    return Column(heading, make_text, unit, is_number=True)
