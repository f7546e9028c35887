"""Decides how certain the mean of a cell's repeats is: fewest repeats, level of error, interval and scatter.

Which cells are called the fastest, by these: collect/choices/standing.py. Which claims hold: collect/verdicts/claims.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

LEAST_REPEATS = 3  # with this many repeats or more, the interval of a mean is computed from the scatter of these repeats
ERROR_LEVEL = 0.025  # the probability of error on each side of an interval, as in two-sided 95 % intervals; T_975 is for it
# Upper 2.5 % points of Student's t for 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Z_975 = 1.959963984540054
OUTLIER_SCORE = 3.5  # a larger modified z-score is an outlier: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993
MIN_OUTLIER_VALUES = 5  # with fewer values, if two of them happen to be close, any third value looks like an outlier


class Estimate(msgspec.Struct, frozen=True, omit_defaults=True):
    """A metric of a cell over its repeats. low, high and noise_pct are absent if n = 1."""

    value: float
    """The mean over repeats."""
    unit: str
    n: int
    """Number of repeats."""
    median: float
    """The median over repeats."""
    low: float | None = None
    """Lower end of the 95 % interval of the mean, by Student's t."""
    high: float | None = None
    """Upper end of the 95 % interval of the mean."""
    kind: str = ""
    """What was measured, if the metric can be measured in several ways."""
    noise_pct: float | None = None
    """Standard deviation of the repeats, which do the same work, in percent of their mean."""


class Noise(msgspec.Struct, frozen=True):
    """The scatter of repeats of the same cell, pooled over all cells with several repeats."""

    relative_deviation: float
    """Standard deviation divided by the mean."""
    degrees_of_freedom: int
    """Degrees of freedom."""
    cell_count: int
    """Number of cells with several repeats."""


def compute_t_975(degrees_of_freedom: int) -> float:
    """The 97.5 % quantile of Student's t. degrees_of_freedom: the degrees of freedom, at least 1.

    For more degrees of freedom than the table T_975 has, the quantile is computed by the expansion in 1/degrees of Abramowitz
    and Stegun 26.7.5 up to the second order, whose error in this range is less than 0.0005.
    """
    if degrees_of_freedom < 1:
        raise ValueError(f"{degrees_of_freedom} degrees of freedom")
    if degrees_of_freedom <= len(T_975):
        return T_975[degrees_of_freedom - 1]
    z = Z_975
    return z + (z**3 + z) / (4 * degrees_of_freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees_of_freedom**2)


def compute_deviation(values: Sequence[float], mean: float) -> float:
    """The standard deviation of at least two values.

    It is computed in two passes, because statistics.stdev computes with fractions and takes 25 times as long.
    """
    if min(values) == max(values):  # by rounding, the mean of equal values may differ from these values
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def estimate_mean(values: Sequence[float], unit: str, kind: str = "") -> Estimate:
    """The mean of independent repeats with the 95 % interval of the mean, by Student's t: mean ± t s / sqrt(n).

    values: one per repeat. unit: the unit of all values. kind: what all values measure, as in `Estimate`.
    """
    repeat_count, mean = len(values), statistics.fmean(values)
    if repeat_count == 1:
        return Estimate(mean, unit, 1, mean, kind=kind)
    standard_deviation = compute_deviation(values, mean)
    half_width = compute_t_975(repeat_count - 1) * standard_deviation / math.sqrt(repeat_count)
    noise_pct = 100 * standard_deviation / abs(mean) if mean else None
    return Estimate(mean, unit, repeat_count, statistics.median(values), mean - half_width, mean + half_width, kind, noise_pct)


def pool_noise(values_by_cell: Iterable[Sequence[float]]) -> Noise | None:
    """The scatter of repeats, pooled over all cells with several repeats: sqrt(sum (n - 1) (s / mean)² / sum (n - 1)).

    values_by_cell: for each cell, the values of its repeats. None if no cell has several repeats.
    """
    square_sum, degrees_of_freedom, cell_count = 0.0, 0, 0
    for values in values_by_cell:
        if len(values) > 1 and (mean := statistics.fmean(values)):
            square_sum += (len(values) - 1) * (compute_deviation(values, mean) / mean) ** 2
            degrees_of_freedom += len(values) - 1
            cell_count += 1
    return Noise(math.sqrt(square_sum / degrees_of_freedom), degrees_of_freedom, cell_count) if degrees_of_freedom else None


def compute_standard_error(values: Sequence[float], noise: Noise | None) -> tuple[float, int] | None:
    """(standard error of the mean of `values`, degrees of freedom), or None if the scatter of the values is not known.

    With LEAST_REPEATS or more values, the error is computed from the scatter of these values. With fewer, it is computed
    from the relative scatter that is pooled over all repeated cells, if this scatter is known and the mean is not 0; otherwise
    from the scatter of the two values.

    noise: the pooled scatter (`pool_noise`).
    """
    repeat_count, mean = len(values), statistics.fmean(values)
    if repeat_count < LEAST_REPEATS and noise and mean:
        return noise.relative_deviation * abs(mean) / math.sqrt(repeat_count), noise.degrees_of_freedom
    return (compute_deviation(values, mean) / math.sqrt(repeat_count), repeat_count - 1) if repeat_count > 1 else None


def find_outlier_indexes(values: Sequence[float]) -> list[int]:
    """The indexes of outliers: values whose modified z-score, 0.6745 |x - median| / MAD, is greater than 3.5.

    Empty if there are fewer than five values. Outliers are only reported; they stay part of every mean and figure.
    """
    if len(values) < MIN_OUTLIER_VALUES:
        return []
    median = statistics.median(values)
    distances = [abs(value - median) for value in values]
    if not (median_distance := statistics.median(distances)):
        return []
    return [index for index, distance in enumerate(distances) if 0.6745 * distance / median_distance > OUTLIER_SCORE]
