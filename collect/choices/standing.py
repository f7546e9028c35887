"""Who is ahead by one criterion, and who cannot be told from the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import polars as pl

from collect.row import Row
from collect.verdicts.chance import Value
from collect.verdicts.claims import LEVEL
from collect.verdicts.number import Number
from collect.verdicts.selection import Found, Measurements

ACCURACY = "final_accuracy_pct"
CRITERIA = ("throughput_per_s", "peak_memory_bytes", "sent_counted_bytes", ACCURACY, "energy_per_unit_j")
Word = Literal["best", "not told apart", "equal", "same work", "as measured"]


class Placed(msgspec.Struct, omit_defaults=True):
    """A cell by its mean. low, high: the 95 % interval, where one is known."""

    cell: str
    value: float
    low: float | None = None
    high: float | None = None


class Standing(msgspec.Struct, omit_defaults=True):
    """A contest by one criterion. placed: best first; best: the cells that none is better than, as far as can be told.

    word: best (one is ahead of each other one in 97.5 % of draws, as in a verdict), not told apart, equal (counted, the same),
    same work (an accuracy of cells proven to do the same: what differs is rounding), or as measured (n = 1 and no noise to go
    by: who was ahead once). margin_pct: from the first to the next that is not among the best, in percent of that one.
    """

    criterion: str
    unit: str
    word: Word
    best: list[str]
    placed: list[Placed]
    kind: str = ""
    margin_pct: float | None = None


def standings(measurements: Measurements, rows: Sequence[Row]) -> list[Standing]:
    """By each criterion that two or more of these rows have, in one unit. rows: of one contest, such as may be ranked."""
    found = (_standing(measurements, name, [row for row in rows if name in row.metrics]) for name in CRITERIA)
    return [standing for standing in found if standing is not None]


def _standing(measurements: Measurements, name: str, rows: Sequence[Row]) -> Standing | None:
    estimates = [row.metrics[name] for row in rows]
    if len(rows) < 2 or len({(estimate.unit, estimate.kind) for estimate in estimates}) > 1:
        return None
    metric = measurements.metrics[name]
    higher = metric.direction == "higher is better"
    numbers = [
        Number(measurements, Found(row, metric, [run.metrics[name] for run in row.runs if name in run.metrics], ""))
        for row in rows
    ]
    numbers.sort(key=lambda number: (-number.value if higher else number.value, number.found.row.id))
    first, others = numbers[0], numbers[1:]
    apart = [_told_apart(first, other) for other in others]
    best = [first, *(other for other, told in zip(others, apart) if told is False or other.value == first.value)]
    word: Word = "best"
    if None in apart:
        word = "as measured"
    elif len(best) > 1:
        known = {(number.value, number.low, number.high) for number in best}
        word = "equal" if known == {(first.value, first.value, first.value)} else "not told apart"
        if name == ACCURACY and all(_proven(number) for number in best):
            word = "same work"
    behind = next((number for number in others if number not in best), None)
    margin = None
    if behind is not None and behind.value and word != "not told apart":
        margin = 100 * abs(first.value - behind.value) / abs(behind.value)
    return Standing(
        criterion=name,
        unit=estimates[0].unit,
        word=word,
        best=[number.found.row.id for number in best],
        placed=[Placed(number.found.row.id, number.value, number.low, number.high) for number in numbers],
        kind=estimates[0].kind,
        margin_pct=margin,
    )


def _told_apart(best: Number, other: Number) -> bool | None:
    """Whether the one that is ahead is so in 97.5 % of draws; None where nothing tells it.

    The intervals settle most pairs, without draws. Where they do not overlap, it is: half-widths add up for the heaviest tails
    that t has (1 degree of freedom), and to less for others. Where one of them holds the other's mean, it is not: a second
    unknown can only spread a sum of symmetric ones with one peak (Birnbaum, 1948).
    """
    if best.found.metric.name == ACCURACY and _proven(best) and _proven(other):
        return False
    if best.high is None or other.high is None:
        return None
    if best.value == other.value:
        return False
    halves = (best.high - best.value, other.high - other.value)
    distance = abs(best.value - other.value)
    if distance >= sum(halves) or distance < max(halves):
        return distance >= sum(halves)
    one, two = _series(best.draws), _series(other.draws)
    ahead = one > two if best.value > other.value else one < two
    return float(ahead.mean() or 0) >= 1 - LEVEL  # type: ignore[arg-type]


def _proven(number: Number) -> bool:
    proof = number.found.row.same_work
    return proof is not None and proof.verdict == "proven"


def _series(value: Value | None) -> pl.Series:
    return value if isinstance(value, pl.Series) else pl.Series([value])
