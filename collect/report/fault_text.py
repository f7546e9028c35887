"""Writes what faults on purpose did, as two tables of text for the terminal, the page and the exports."""

from __future__ import annotations

from collections.abc import Sequence

from collect import notation
from collect.findings.injected_faults import LostWorkerEffect, StragglerEffect
from collect.report.text_table import TextTable
from collect.summary import Summary

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


def tables(summary: Summary) -> list[TextTable]:
    """The tables of slowed ranks and of lost workers that have rows."""
    labels = summary.label_of
    slowed = [_slowed(one, labels[one.cell]) for one in summary.slowed]
    lost = [_lost(one, labels[one.cell]) for one in summary.lost]
    found = [
        TextTable(
            "slowed",
            "Ranks that were slowed on purpose",
            ["Cell", "n", "Delay of a step (ms)", "Found", "Throughput by the slowest rank (units/s)",
             "By each rank's own time (units/s)",
             "Waiting of ranks 0, 1, ... (ms)", "Staleness, mean"],
            slowed,
            frozenset({1, 2, 4, 5, 7}),
        ),
        TextTable(
            "lost",
            "Workers that were lost on purpose",
            ["Cell", "State", "n", "Before (units/s)", "After (units/s)", "Not seen (units)", "Not seen (%)", "Last step",
             "Loss (nats)"],
            lost,
            frozenset(range(2, 9)),
        ),
    ]  # fmt: skip
    return [table for table in found if table.rows]


def _slowed(one: StragglerEffect, label: str) -> list[str]:
    waiting = [notation.number(ms, 2) for ms in one.waiting_ms[:MOST_RANKS]]
    waiting += ["..."] if len(one.waiting_ms) > MOST_RANKS else []
    return [
        label,
        str(one.n),
        notation.number(one.delay_ms, 3),
        "" if one.found is None else f"rank {one.found}",
        _beside(one.throughput_per_s, one.ordinary_throughput_per_s),
        _beside(one.rank_throughput_per_s, one.ordinary_rank_throughput_per_s),
        ", ".join(waiting),
        _beside(one.staleness_mean, one.ordinary_staleness_mean),
    ]


def _lost(one: LostWorkerEffect, label: str) -> list[str]:
    numbers: Sequence[float | None] = (one.before_per_s, one.after_per_s, one.unseen_units)
    return [
        label,
        one.state,
        str(one.n),
        *("" if value is None else notation.number(value) for value in numbers),
        "" if one.unseen_pct is None else notation.number(one.unseen_pct, 3),
        "" if one.last_step is None else str(one.last_step),
        _beside(one.last_loss, one.ordinary_loss),
    ]


def _beside(value: float | None, ordinary: float | None) -> str:
    """A value, and in brackets the value of the cell without the fault."""
    said = "" if value is None else notation.number(value)
    return f"{said} ({notation.number(ordinary)})".strip() if ordinary is not None else said
