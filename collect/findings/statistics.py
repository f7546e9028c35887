"""Estimates from the repeats of a cell: mean, median, the interval of the mean, and how much repeats scatter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

# Upper 2.5 % points of Student's t for 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Z_975 = 1.959963984540054
FAR = 3.5  # modified z-scores beyond it are outliers: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993
FEWEST_FOR_OUTLIERS = 5  # of fewer, two that happen to lie close make an outlier of any third


class Estimate(msgspec.Struct, frozen=True, omit_defaults=True):
    """A metric of a cell over its repeats. value: their mean; low, high: its 95 % interval by Student's t.

    noise_pct: standard deviation of the repeats over the size of their mean: repeats of a cell are A/A runs, the same work
    twice. low, high and noise_pct are absent for n = 1.
    """

    value: float
    unit: str
    n: int
    median: float
    low: float | None = None
    high: float | None = None
    kind: str = ""
    noise_pct: float | None = None


class Noise(msgspec.Struct, frozen=True):
    """How much repeats of the same cell scatter, pooled. relative: standard deviation over the mean; degrees: of freedom;
    cells: how many cells were repeated."""

    relative: float
    degrees: int
    cells: int


def t_975(degrees: int) -> float:
    """The quantile of Student's t that 97.5 % lie below.

    Beyond the table, the expansion in 1/degrees of Abramowitz and Stegun 26.7.5, cut after the second order: closer than
    0.0005 there.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom")
    if degrees <= len(T_975):
        return T_975[degrees - 1]
    z = Z_975
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def deviation(values: Sequence[float], mean: float) -> float:
    """The standard deviation of two values or more, in two passes: statistics.stdev takes fractions, and 25 times as long."""
    if min(values) == max(values):  # their mean may be off by its last digit
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def estimate(values: Sequence[float], unit: str, kind: str = "") -> Estimate:
    """The mean of independent repeats with the 95 % interval of the mean, by Student's t: mean ± t s / sqrt(n)."""
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Estimate(mean, unit, 1, mean, kind=kind)
    spread = deviation(values, mean)
    half = t_975(n - 1) * spread / math.sqrt(n)
    noise_pct = 100 * spread / abs(mean) if mean else None
    return Estimate(mean, unit, n, statistics.median(values), mean - half, mean + half, kind, noise_pct)


def noise(repeats: Iterable[Sequence[float]]) -> Noise | None:
    """The pooled scatter of cells that were repeated: sqrt(sum (n - 1) (s / mean)² / sum (n - 1)); None where none was."""
    squares, degrees, cells = 0.0, 0, 0
    for values in repeats:
        if len(values) > 1 and (mean := statistics.fmean(values)):
            squares += (len(values) - 1) * (deviation(values, mean) / mean) ** 2
            degrees += len(values) - 1
            cells += 1
    return Noise(math.sqrt(squares / degrees), degrees, cells) if degrees else None


def standard_error(values: Sequence[float], pooled: Noise | None) -> tuple[float, int] | None:
    """(standard error of the mean, degrees of freedom), or None if the scatter is not known.

    Three or more values: from their own scatter. One or two values: from the pooled relative scatter of all repeated cells, if
    there is one and the mean is not 0; else two values use their own scatter.
    """
    n, mean = len(values), statistics.fmean(values)
    if n < 3 and pooled and mean:
        return pooled.relative * abs(mean) / math.sqrt(n), pooled.degrees
    return (deviation(values, mean) / math.sqrt(n), n - 1) if n > 1 else None


def outliers(values: Sequence[float]) -> list[int]:
    """The places of values whose modified z-score, 0.6745 |x - median| / MAD, is beyond 3.5; none of fewer than five.

    They are named and stay in every figure.
    """
    if len(values) < FEWEST_FOR_OUTLIERS:
        return []
    median = statistics.median(values)
    distance = [abs(value - median) for value in values]
    if not (typical := statistics.median(distance)):
        return []
    return [place for place, far in enumerate(distance) if 0.6745 * far / typical > FAR]
