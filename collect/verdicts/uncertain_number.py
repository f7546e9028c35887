"""Represents a metric of a cell as an uncertain number: its mean over repeats, its 95 % interval, and random draws of the mean.

Further computation, such as the test of a claim, uses the draws.
"""

from __future__ import annotations

import numpy as np

from collect.findings.statistics import standard_error, t_975
from collect.verdicts.draws import DRAWS, Value, draws, quantile
from collect.verdicts.selection import Measurements, SelectedMetric

EXACT = "exact: the same in every repeat"
POOLED = "interval from the noise of all repeated cells of this matrix"
ALONE = "n = 1, and no cell of this matrix was repeated: no interval"
UNBOUNDED = "the baseline's interval reaches to 0, so the result has no interval"
MOST_UNDEFINED = 0.025  # the share of draws beyond one end of a 95 % interval


class Number:
    """A metric of a cell as an uncertain number.

    found: the values of the metric. n: the number of repeats. value: the mean over the repeats.

    low, high: the 95 % interval by Student's t. draws: random draws of the mean. low, high and draws are None if the scatter is
    not known.

    how: how the interval was computed, if it was not computed from the repeats of the cell itself, or why there is no interval.
    """

    def __init__(self, measurements: Measurements, found: SelectedMetric) -> None:
        self.found = found
        self.n = len(found.values)
        self.low: float | None = None
        self.high: float | None = None
        self.how = ""
        self.draws: Value | None = None
        self.value = found.mean
        if found.beside is not None:
            self._of_two(measurements, found, *found.beside)
            return
        if found.metric.exact and len(set(found.values)) == 1:
            self.low = self.high = self.draws = self.value
            self.how = EXACT
            return
        known = standard_error(found.values, measurements.noise(found.metric, found.argument))
        if known is None:
            self.how = ALONE
            return
        error, degrees = known
        self.how = POOLED if self.n < 3 and degrees != self.n - 1 else ""
        self.low, self.high = self.value - t_975(degrees) * error, self.value + t_975(degrees) * error
        asked = "" if found.argument is None else f" {found.argument}"
        self.draws = draws(self.value, error, degrees, f"{found.metric.name} {found.row.id}{asked}")

    def _of_two(self, measurements: Measurements, found: SelectedMetric, one: SelectedMetric, other: SelectedMetric) -> None:
        """Compute the draws of a metric that compares two cells: its formula is applied to the draws of both cells."""
        mine = Number(measurements, one)
        theirs = mine if one.row.id == other.row.id else Number(measurements, other)
        value = measurements.compared(found, mine.value, theirs.value)
        assert value is not None
        self.value = value
        self.how = mine.how or theirs.how
        if mine.draws is None or theirs.draws is None:
            return
        drawn = [_listed(known) for known in (mine.draws, theirs.draws)]
        compared = [measurements.compared(found, a, b) for a, b in zip(*drawn, strict=True)]
        defined = [value for value in compared if value is not None]
        if len(defined) < (1 - MOST_UNDEFINED) * len(compared):
            self.how = UNBOUNDED
            return
        # A comparison is undefined only if it divides by 0 or less. With few repeats, some draws lie so far from the mean. The
        # value grows as its divisor goes to 0, so such a draw gets the largest value of the other draws.
        largest = max(defined)
        both = np.array([largest if value is None else value for value in compared])
        self.low, self.high = quantile(both, 0.025), quantile(both, 0.975)
        self.draws = self.low if self.low == self.high else both


def _listed(value: Value) -> list[float]:
    assert not isinstance(value, str)
    return list(np.broadcast_to(value, DRAWS).tolist())
