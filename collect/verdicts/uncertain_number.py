"""Represents a metric of a cell as an uncertain number: its mean over repeats, its 95 % interval, and random draws of the mean.

Further computation, such as the test of a claim, uses the draws.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from collect.findings.statistics import ERROR_LEVEL, LEAST_REPEATS, compute_standard_error, compute_t_975
from collect.verdicts.draws import DRAW_COUNT, CallValue, compute_quantile, draw_mean
from collect.verdicts.selection import Measurements, SelectedMetric

EXACT_TEXT = "exact: the same in every repeat"
POOLED_TEXT = "interval from the noise of all repeated cells of this matrix"
ALONE_TEXT = "n = 1, and no cell of this matrix was repeated: no interval"
UNBOUNDED_TEXT = "the baseline's interval reaches to 0, so the result has no interval"


class UncertainNumber:
    """A metric of a cell as an uncertain number.

    selected: the values of the metric. n: the number of repeats. value: the mean over the repeats.

    error_and_degrees: the standard error of the mean and its degrees of freedom; None for a metric that compares two cells.
    low, high: the 95 % interval by Student's t. All of them are None if the scatter is not known.

    how: how the interval was computed, if it was not computed from the repeats of the cell itself, or why there is no interval.
    """

    def __init__(self, measurements: Measurements, selected: SelectedMetric) -> None:
        self.selected = selected
        self.n = len(selected.values)
        self.low: float | None = None
        self.high: float | None = None
        self.how = ""
        self.error_and_degrees: tuple[float, int] | None = None
        self.value = selected.mean
        if selected.compared_pair is not None:
            self.draws = None
            self._compare_two(measurements, selected, *selected.compared_pair)
            return
        is_exact = selected.metric.exact and len(set(selected.values)) == 1
        noise = None if is_exact else measurements.find_noise(selected.metric, selected.argument)
        self.error_and_degrees = (0.0, 1) if is_exact else compute_standard_error(selected.values, noise)
        if self.error_and_degrees is None:
            self.how = ALONE_TEXT
            return
        error_of_mean, freedom_degrees = self.error_and_degrees
        is_pooled = self.n < LEAST_REPEATS and freedom_degrees != self.n - 1
        self.how = EXACT_TEXT if is_exact else POOLED_TEXT if is_pooled else ""
        self.low = self.value - compute_t_975(freedom_degrees) * error_of_mean
        self.high = self.value + compute_t_975(freedom_degrees) * error_of_mean

    @cached_property
    def draws(self) -> CallValue | None:
        """Random draws of the mean, or the mean itself if it does not scatter; None if the scatter is not known.

        The same metric of the same cell has the same draws everywhere.
        """
        if self.error_and_degrees is None:
            return None
        argument_text = "" if self.selected.argument is None else f" {self.selected.argument}"
        name = f"{self.selected.metric.name} {self.selected.row.id}{argument_text}"
        return draw_mean(self.value, *self.error_and_degrees, name)

    def _compare_two(
        self,
        measurements: Measurements,
        selected: SelectedMetric,
        first_selected: SelectedMetric,
        other_selected: SelectedMetric,
    ) -> None:
        """Compute the draws of a metric that compares two cells: its formula is applied to the draws of both cells."""
        first_number = UncertainNumber(measurements, first_selected)
        other_number = (
            first_number if first_selected.row.id == other_selected.row.id else UncertainNumber(measurements, other_selected)
        )
        value = measurements.compare_values(selected, first_number.value, other_number.value)
        assert value is not None
        self.value = value
        self.how = first_number.how or other_number.how
        if first_number.draws is None or other_number.draws is None:
            return
        draws_of_cells = [_draw_list(draws_or_value) for draws_or_value in (first_number.draws, other_number.draws)]
        compared_draws = [
            measurements.compare_values(selected, first_draw, other_draw)
            for first_draw, other_draw in zip(*draws_of_cells, strict=True)
        ]
        defined_draws = [value for value in compared_draws if value is not None]
        if len(defined_draws) < (1 - ERROR_LEVEL) * len(compared_draws):
            self.how = UNBOUNDED_TEXT
            return
        # A comparison is undefined only if it divides by 0 or less. With few repeats, some draws lie so far from the mean. The
        # value grows as its divisor goes to 0, so such a draw gets the largest value of the other draws.
        largest_draw = max(defined_draws)
        filled_draws = np.array([largest_draw if value is None else value for value in compared_draws])
        self.low, self.high = compute_quantile(filled_draws, ERROR_LEVEL), compute_quantile(filled_draws, 1 - ERROR_LEVEL)
        self.draws = self.low if self.low == self.high else filled_draws


def _draw_list(draws_or_value: CallValue) -> list[float]:
    assert not isinstance(draws_or_value, str)
    return list(np.broadcast_to(draws_or_value, DRAW_COUNT).tolist())
