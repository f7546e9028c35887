"""Who is ahead by one criterion, and who cannot be told from the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import polars as pl

from collect.row import Row
from collect.verdicts.chance import DRAWS, Value, half_width
from collect.verdicts.claims import LEVEL
from collect.verdicts.number import Number
from collect.verdicts.selection import Found, Measurements

ACCURACY = "final_accuracy_pct"
SENT = "sent_counted_bytes"
CRITERIA = ("throughput_per_s", "peak_memory_bytes", SENT, ACCURACY, "energy_per_unit_j")
ALIKE = 1e-3  # counts that differ by less, such as by a scalar that is summed beside the gradients, are no reason to choose
Word = Literal["best", "not told apart", "equal", "same work", "as measured"]


class Placed(msgspec.Struct, omit_defaults=True):
    """A cell by its mean. low, high: the 95 % interval, where one is known."""

    cell: str
    value: float
    low: float | None = None
    high: float | None = None


class Standing(msgspec.Struct, omit_defaults=True):
    """A contest by one criterion. placed: best first; best: the cells that none is better than, as far as can be told.

    word: best (one is ahead of each other one in 97.5 % of draws, as in a verdict), not told apart, equal (no scatter;
    of counts, within 0.1 %),
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
    """By each criterion that two or more of these rows have, in one unit. rows: of one contest, such as may be ranked.

    That one is ahead of all others takes no correction, as every test has to hold (Berger, 1982). Where not all do, one is left
    out of the best that is behind in all but 2.5 % / (number of others) of draws (Bonferroni).
    """
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
    if metric.exact and not any(number.value for number in numbers):
        return None  # as on one rank, where nothing is sent
    numbers.sort(key=lambda number: (-number.value if higher else number.value, number.found.row.id))
    first, others = numbers[0], numbers[1:]
    word: Word
    apart = [_told_apart(first, other, LEVEL) for other in others]
    best, word = [first], "best"
    if not all(apart):
        level = LEVEL / len(others)
        best += [other for other, told in zip(others, apart) if not (told and _told_apart(first, other, level))]
        counted = all(number.low == number.high for number in best)
        word = "equal" if counted and (metric.exact or best[-1].value == first.value) else "not told apart"
        if name == ACCURACY and all(_proven(number) for number in best):
            word = "same work"
    if None in apart:
        best, word = [number for number in numbers if number.value == first.value], "as measured"
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


def _told_apart(best: Number, other: Number, level: float) -> bool | None:
    """Whether the one that is ahead is so in all but this share of draws; None where nothing tells it.

    Intervals settle most pairs, without draws. Where they do not overlap, it is: half-widths add up for the heaviest tails
    that t has (1 degree of freedom), and to less for others. Where one of them holds the other's mean, it is not: a second
    unknown can only spread a sum of symmetric ones with one peak (Birnbaum, 1948).
    """
    if best.found.metric.name == ACCURACY and _proven(best) and _proven(other):
        return False
    if best.known is None or other.known is None:
        return None
    distance = abs(best.value - other.value)
    if best.found.metric.exact and distance <= ALIKE * abs(best.value):
        return False
    halves = [error * half_width(degrees, level) for error, degrees in (best.known, other.known)]
    if distance == 0 or distance < max(halves):
        return False
    if distance >= sum(halves):
        return True
    one, two = _series(best.draws), _series(other.draws)
    ahead = int((one > two if best.value > other.value else one < two).sum())
    return ahead >= (1 - level) * DRAWS


def _proven(number: Number) -> bool:
    proof = number.found.row.same_work
    return proof is not None and proof.verdict == "proven"


def _series(value: Value | None) -> pl.Series:
    return value if isinstance(value, pl.Series) else pl.Series([value] * DRAWS)
