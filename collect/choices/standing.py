"""Ranks the cells of a contest by one criterion, and finds the cells that are not significantly worse than the best cell.

The level of error and the fewest repeats stand in collect/findings/statistics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from collect.findings import comparability
from collect.findings.row import CellRow
from collect.findings.statistics import ERROR_LEVEL
from collect.verdicts.draws import DRAW_COUNT, compute_half_width
from collect.verdicts.selection import Measurements
from collect.verdicts.uncertain_number import UncertainNumber

ACCURACY_METRIC = "final_accuracy_pct"
SENT_BYTES_METRIC = "sent_counted_bytes"
CRITERIA = ("throughput_per_s", "peak_memory_bytes", SENT_BYTES_METRIC, ACCURACY_METRIC, "energy_per_unit_j")
# Two counts (e.g. of sent bytes) are called equal up to this relative difference, because a strategy may send a few more bytes
# than another, e.g. to sum one number over all ranks.
EQUAL_TOLERANCE = 1e-3
StandingWord = Literal["best", "not told apart", "equal", "same work", "as measured"]


class RankedCell(msgspec.Struct, omit_defaults=True):
    """A cell and its mean of the criterion."""

    cell: str
    """The id of the cell."""
    value: float
    """The mean over repeats."""
    low: float | None = None
    """Lower end of the 95 % interval; None: not known."""
    high: float | None = None
    """Upper end of the 95 % interval; None: not known."""


class Standing(msgspec.Struct, omit_defaults=True):
    """The cells of a contest, ranked by one criterion.

    word says how certain the order is:

    - best: one cell is ahead of every other cell in 97.5 % of draws, as in a verdict.
    - not told apart: several cells cannot be distinguished.
    - equal: the values have no scatter and are equal (counts: within 0.1 %).
    - same work: the accuracies of cells that are proven to do the same work; their differences are rounding.
    - as measured: the scatter is not known (n = 1, and no cell was repeated); this is the order of single measurements.
    """

    criterion: str
    """The name of the metric."""
    unit: str
    word: StandingWord
    """How certain the order is: one of the words above."""
    best: list[str]
    """Ids of the first cell and of the cells that are not significantly worse."""
    placed: list[RankedCell]
    """All cells, best first."""
    kind: str = ""
    """How the metric was measured, if there are several ways."""
    margin_pct: float | None = None
    """By how many percent the first cell differs from the best cell that is not in `best`."""


def rank_cells(measurements: Measurements, rows: Sequence[CellRow]) -> list[Standing]:
    """Rank the cells of a contest by each criterion for which two or more of the cells have values in the same unit.

    rows: the cells of one contest that may be ranked. Returns one standing per criterion.

    A cell is the best if it is significantly ahead of each other cell. These tests need no correction for their number,
    because all of them have to hold (Berger, 1982). If no cell is the best, a cell is excluded from the best cells only if it
    is behind the first cell in all but 2.5 % / (number of other cells) of draws (Bonferroni).
    """
    candidates = (_rank_by_criterion(measurements, name, [row for row in rows if name in row.metrics]) for name in CRITERIA)
    return [standing for standing in candidates if standing is not None]


def _rank_by_criterion(measurements: Measurements, criterion: str, rows: Sequence[CellRow]) -> Standing | None:
    estimates = [row.metrics[criterion] for row in rows]
    if len(rows) < 2 or len({(estimate.unit, estimate.kind) for estimate in estimates}) > 1:
        return None
    metric = measurements.metrics[criterion]
    if metric.of_all_steps and comparability.have_different_instruments(row.cell for row in rows):
        return None
    higher_is_better = metric.direction == "higher is better"
    means = [UncertainNumber(measurements, measurements.select_measured(metric, row)) for row in rows]
    if metric.exact and not any(mean.value for mean in means):
        return None  # nothing to rank: all values are 0, for example the bytes sent on one rank
    means.sort(key=lambda mean: (-mean.value if higher_is_better else mean.value, mean.selected.row.id))
    first_mean, other_means = means[0], means[1:]
    word: StandingWord
    is_ahead_of_other = [_is_ahead(first_mean, other, ERROR_LEVEL) for other in other_means]
    best, word = [first_mean], "best"
    if not all(is_ahead_of_other):
        corrected_level = ERROR_LEVEL / len(other_means)
        other_pairs = zip(other_means, is_ahead_of_other)
        best += [other for other, is_ahead in other_pairs if not (is_ahead and _is_ahead(first_mean, other, corrected_level))]
        have_no_scatter = all(mean.error_and_degrees is not None and mean.error_and_degrees[0] == 0 for mean in best)
        word = "equal" if have_no_scatter and (metric.exact or best[-1].value == first_mean.value) else "not told apart"
        if criterion == ACCURACY_METRIC and all(_is_proven(mean) for mean in best):
            word = "same work"
    if None in is_ahead_of_other:
        best, word = [mean for mean in means if mean.value == first_mean.value], "as measured"
    runner_up = next((mean for mean in other_means if mean not in best), None)
    margin_pct = None
    if runner_up is not None and runner_up.value and word != "not told apart":
        margin_pct = 100 * abs(first_mean.value - runner_up.value) / abs(runner_up.value)
    return Standing(
        criterion=criterion,
        unit=estimates[0].unit,
        word=word,
        best=[mean.selected.row.id for mean in best],
        placed=[RankedCell(mean.selected.row.id, mean.value, mean.low, mean.high) for mean in means],
        kind=estimates[0].kind,
        margin_pct=margin_pct,
    )


def _is_ahead(best: UncertainNumber, other: UncertainNumber, level: float) -> bool | None:
    """Whether `best` is ahead of `other` in all but the share `level` of draws; None if the scatter of one of the two is not
    known.

    The intervals decide most pairs without draws. If the intervals do not overlap, `best` is ahead: the half-width of the
    difference is at most the sum of both half-widths, which it reaches for the heaviest tails of t (1 degree of freedom). If
    one interval contains the mean of the other cell, `best` is not ahead: adding a second symmetric unimodal variable can only
    widen the distribution (Birnbaum, 1948).
    """
    if best.selected.metric.name == ACCURACY_METRIC and _is_proven(best) and _is_proven(other):
        return False
    if best.error_and_degrees is None or other.error_and_degrees is None:
        return None
    mean_distance = abs(best.value - other.value)
    if best.selected.metric.exact and mean_distance <= EQUAL_TOLERANCE * abs(best.value):
        return False
    half_widths = [
        error * compute_half_width(degrees, level) for error, degrees in (best.error_and_degrees, other.error_and_degrees)
    ]
    if mean_distance == 0 or mean_distance < max(half_widths):
        return False
    if mean_distance >= sum(half_widths):
        return True
    draws_of_best, draws_of_other = (np.broadcast_to(np.asarray(number.draws), DRAW_COUNT) for number in (best, other))
    ahead_count = int((draws_of_best > draws_of_other if best.value > other.value else draws_of_best < draws_of_other).sum())
    return ahead_count >= (1 - level) * DRAW_COUNT


def _is_proven(number: UncertainNumber) -> bool:
    proof = number.selected.row.same_work
    return proof is not None and proof.verdict == "proven"
