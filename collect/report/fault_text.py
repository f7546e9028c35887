"""Writes what faults on purpose did, as two tables of text for the terminal, the page and the exports."""

from __future__ import annotations

from collections.abc import Sequence

from collect.findings.injected_faults import LostWorkerEffect, StragglerEffect
from collect.report.text_table import TextTable
from collect.summary import Summary
from shardlab.terminal import notation

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


def fault_tables(summary: Summary) -> list[TextTable]:
    """The tables of slowed ranks and of lost workers that have rows."""
    labels = summary.labels_by_cell
    slowed_rows = [_straggler_row(effect, labels[effect.cell]) for effect in summary.slowed]
    lost_rows = [_lost_worker_row(effect, labels[effect.cell]) for effect in summary.lost]
    all_tables = [
        TextTable(
            "slowed",
            "Ranks that were slowed on purpose",
            ["Cell", "n", "Delay of a step (ms)", "Found", "Throughput by the slowest rank (units/s)",
             "By each rank's own time (units/s)",
             "Waiting of ranks 0, 1, ... (ms)", "Staleness, mean"],
            slowed_rows,
            frozenset({1, 2, 4, 5, 7}),
        ),
        TextTable(
            "lost",
            "Workers that were lost on purpose",
            ["Cell", "State", "n", "Before (units/s)", "After (units/s)", "Not seen (units)", "Not seen (%)", "Last step",
             "Loss (nats)"],
            lost_rows,
            frozenset(range(2, 9)),
        ),
    ]  # fmt: skip
    return [table for table in all_tables if table.rows]


def _straggler_row(effect: StragglerEffect, label: str) -> list[str]:
    waiting = [notation.format_number(ms, 2) for ms in effect.waiting_ms[:MOST_RANKS]]
    waiting += ["..."] if len(effect.waiting_ms) > MOST_RANKS else []
    return [
        label,
        str(effect.n),
        notation.format_number(effect.delay_ms, 3),
        "" if effect.found is None else f"rank {effect.found}",
        _with_ordinary_value(effect.throughput_per_s, effect.ordinary_throughput_per_s),
        _with_ordinary_value(effect.rank_throughput_per_s, effect.ordinary_rank_throughput_per_s),
        ", ".join(waiting),
        _with_ordinary_value(effect.staleness_mean, effect.ordinary_staleness_mean),
    ]


def _lost_worker_row(effect: LostWorkerEffect, label: str) -> list[str]:
    numbers: Sequence[float | None] = (effect.before_per_s, effect.after_per_s, effect.unseen_units)
    return [
        label,
        effect.state,
        str(effect.n),
        *("" if value is None else notation.format_number(value) for value in numbers),
        "" if effect.unseen_pct is None else notation.format_number(effect.unseen_pct, 3),
        "" if effect.last_step is None else str(effect.last_step),
        _with_ordinary_value(effect.last_loss, effect.ordinary_loss),
    ]


def _with_ordinary_value(value: float | None, ordinary: float | None) -> str:
    """A value, and in brackets the value of the cell without the fault."""
    text = "" if value is None else notation.format_number(value)
    return f"{text} ({notation.format_number(ordinary)})".strip() if ordinary is not None else text
