"""What repeats tell: a mean and how well it is known; one measurement tells no interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

# Upper 2.5 % points of Student's t for 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Z_975 = 1.959963984540054


class Estimate(msgspec.Struct, frozen=True, omit_defaults=True):
    """A metric of a cell over its repeats. value: their mean; low, high: its 95 % interval, absent for n = 1."""

    value: float
    unit: str
    n: int
    median: float
    low: float | None = None
    high: float | None = None
    kind: str = ""


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


def estimate(values: Sequence[float], unit: str, kind: str = "") -> Estimate:
    """The mean of independent repeats with the 95 % interval of the mean, by Student's t: mean ± t s / sqrt(n)."""
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Estimate(mean, unit, 1, mean, kind=kind)
    half = t_975(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, unit, n, statistics.median(values), mean - half, mean + half, kind)
