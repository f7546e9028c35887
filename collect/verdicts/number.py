"""A metric of a cell with what its repeats allow: the mean, its interval, and draws of it for whoever computes with it."""

from __future__ import annotations

import statistics

import polars as pl

from collect.statistics import standard_error, t_975
from collect.verdicts.chance import DRAWS, Value, draws
from collect.verdicts.selection import Found, Measurements

EXACT = "exact: the same in every repeat"
POOLED = "interval by the noise of all repeated cells of this matrix"
ALONE = "n = 1, and no cell of this matrix was repeated: no interval"


class Number:
    """value, and its 95 % interval (low, high): the mean's, by Student's t. None, as are draws, where nothing tells it.

    how: what the interval is by, where it is not the cell's own repeats.
    """

    def __init__(self, measurements: Measurements, found: Found) -> None:
        self.found = found
        self.n = len(found.values)
        self.low: float | None = None
        self.high: float | None = None
        self.how = ""
        self.draws: Value | None = None
        if found.against is not None:
            self._beside_baseline(measurements, found, found.against)
            return
        self.value = statistics.fmean(found.values)
        if found.metric.exact and len(set(found.values)) == 1:
            self.low = self.high = self.draws = self.value
            self.how = EXACT
            return
        known = standard_error(found.values, measurements.noise(found.metric))
        if known is None:
            self.how = ALONE
            return
        error, degrees = known
        self.how = POOLED if self.n < 3 and degrees != self.n - 1 else ""
        self.low, self.high = self.value - t_975(degrees) * error, self.value + t_975(degrees) * error
        self.draws = draws(self.value, error, degrees, f"{found.metric.name} {found.row.id}")

    def _beside_baseline(self, measurements: Measurements, found: Found, against: Found) -> None:
        """Draws of both throughputs, put into the metric's own formula."""
        self.value = found.row.metrics[found.metric.name].value
        mine = Number(measurements, Found(found.row, against.metric, found.values, ""))
        theirs = mine if found.row.id == against.row.id else Number(measurements, against)
        self.how = mine.how or theirs.how
        if mine.draws is None or theirs.draws is None:
            return
        drawn = [_series(one.draws) for one in (mine, theirs)]
        found_values = [measurements.compared(found, a, b) for a, b in zip(*drawn, strict=True)]
        series = pl.Series([value for value in found_values if value is not None])
        if series.len() < len(found_values):
            return
        low, high = series.quantile(0.025, "linear"), series.quantile(0.975, "linear")
        assert low is not None
        assert high is not None
        self.low, self.high = low, high
        self.draws = low if low == high else series


def _series(value: Value | None) -> list[float]:
    if isinstance(value, pl.Series):
        return value.to_list()
    assert isinstance(value, float)
    return [value] * DRAWS
