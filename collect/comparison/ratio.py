"""Compares two means: their ratio, its 95 % interval, and whether they differ significantly."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from collect.findings.statistics import compute_t_975

MOST_REPEATS = 1000  # the most runs of a cell that a matrix may ask for
DifferenceWord = Literal["faster", "slower", "higher", "lower", "equal", "not to be told apart", "undecided"]


class Mean(msgspec.Struct, frozen=True):
    """The mean of a metric over repeats, and its error."""

    value: float
    error: float | None
    """The standard error; None: not known; 0: every repeat gives the same value."""
    degrees_of_freedom: int
    """Degrees of freedom of the standard error."""


def compute_mean_ratio(mean_a: Mean, b: Mean) -> tuple[float | None, float | None, float | None]:
    """The ratio of two means, b / a. Returns (ratio, lower end, upper end of the 95 % interval of the ratio).

    The ratio is None if a mean is not greater than 0. The ends are None if the error of a mean is not known, or if the error is
    so large that the mean may be 0.

    The logarithm of the ratio has the error sqrt(ra² + rb²), where ra and rb are the relative errors of a and b (the delta
    method). This error is multiplied by the quantile of Student's t with the degrees of freedom of Welch and Satterthwaite.
    Because of the logarithm, the intervals of b / a and a / b agree.
    """
    if mean_a.value <= 0 or b.value <= 0:
        return None, None, None
    quotient = b.value / mean_a.value
    if mean_a.error is None or b.error is None:
        return quotient, None, None
    variances = [(mean_a.error / mean_a.value) ** 2, (b.error / b.value) ** 2]
    if any(mean.error and mean.error * compute_t_975(mean.degrees_of_freedom) >= mean.value for mean in (mean_a, b)):
        return quotient, None, None
    log_half_width = _find_quantile(variances, [mean_a.degrees_of_freedom, b.degrees_of_freedom]) * math.sqrt(sum(variances))
    return quotient, quotient * math.exp(-log_half_width), quotient * math.exp(log_half_width)


def choose_difference_word(mean_a: Mean, b: Mean, unit: str) -> DifferenceWord:
    """The word that says how the mean b differs from the mean a, such as `faster` or `equal`. unit: the unit of both means.

    Times and rates are `faster` or `slower`. Other metrics are `higher` or `lower`, which does not say whether the change is
    good.
    """
    if mean_a.error is None or b.error is None:
        return "undecided"
    _, low, high = compute_mean_ratio(mean_a, b)
    if low is None or high is None:  # the ratio has no interval, so Welch's test of the difference b - a is used
        variances = [mean_a.error**2, b.error**2]
        half_width = _find_quantile(variances, [mean_a.degrees_of_freedom, b.degrees_of_freedom]) * math.sqrt(sum(variances))
        low, high, value_if_equal = b.value - mean_a.value - half_width, b.value - mean_a.value + half_width, 0.0
    else:
        value_if_equal = 1.0
    if low == high == value_if_equal:
        return "equal"
    if low <= value_if_equal <= high:
        return "not to be told apart"
    is_higher = low > value_if_equal
    if unit.endswith("/s"):
        return "faster" if is_higher else "slower"
    if unit in ("s", "ms"):
        return "slower" if is_higher else "faster"
    return "higher" if is_higher else "lower"


def count_deciding_repeats(deviations: tuple[float, float], ratio: float, threshold: float, least_repeats: int) -> int | None:
    """The number of repeats in A and in B with which the interval of the ratio would exclude `threshold`, which is above 0, if
    the ratio and the scatter stay as they are. None: more than MOST_REPEATS.

    deviations: the standard deviation of the repeats in A and in B, relative to their means. least_repeats: at least 2."""
    log_distance = abs(math.log(ratio / threshold))
    for repeat_count in range(least_repeats, MOST_REPEATS + 1):
        variances = [relative_deviation**2 / repeat_count for relative_deviation in deviations]
        if _find_quantile(variances, [repeat_count - 1, repeat_count - 1]) * math.sqrt(sum(variances)) < log_distance:
            return repeat_count
    return None


def _find_quantile(variances: list[float], degrees_of_freedom: list[int]) -> float:
    """The 97.5 % quantile of Student's t for a sum of variances with these degrees of freedom (Welch, Biometrika 34, 1947).

    The degrees of freedom of the sum are rounded down, so that an interval may be too wide, but never too narrow."""
    denominator = sum(variance**2 / degree for variance, degree in zip(variances, degrees_of_freedom, strict=True) if variance)
    return compute_t_975(max(int(sum(variances) ** 2 / denominator), 1)) if denominator else 0.0
