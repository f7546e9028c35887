"""Represents a metric of a cell as an uncertain number: its mean over repeats, its 95 % interval, and random draws of the mean.

Further computation, such as the test of a claim, uses the draws.
"""

from __future__ import annotations

import numpy as np

from collect.findings.statistics import ERROR_LEVEL, LEAST_REPEATS, compute_standard_error, compute_t_975
from collect.verdicts.draws import DRAW_COUNT, Value, draw_mean, quantile
from collect.verdicts.selection import Measurements, SelectedMetric

EXACT_TEXT = "exact: the same in every repeat"
POOLED_TEXT = "interval from the noise of all repeated cells of this matrix"
ALONE_TEXT = "n = 1, and no cell of this matrix was repeated: no interval"
UNBOUNDED_TEXT = "the baseline's interval reaches to 0, so the result has no interval"


class UncertainNumber:
    """A metric of a cell as an uncertain number.

    selected: the values of the metric. n: the number of repeats. value: the mean over the repeats.

    low, high: the 95 % interval by Student's t. draws: random draws of the mean. low, high and draws are None if the scatter is
    not known.

    how: how the interval was computed, if it was not computed from the repeats of the cell itself, or why there is no interval.
    """

    def __init__(self, measurements: Measurements, selected: SelectedMetric) -> None:
        self.selected = selected
        self.n = len(selected.values)
        self.low: float | None = None
        self.high: float | None = None
        self.how = ""
        self.draws: Value | None = None
        self.value = selected.mean
        if selected.compared_pair is not None:
            self._compare_two(measurements, selected, *selected.compared_pair)
            return
        if selected.metric.exact and len(set(selected.values)) == 1:
            self.low = self.high = self.draws = self.value
            self.how = EXACT_TEXT
            return
        error_and_degrees = compute_standard_error(selected.values, measurements.noise(selected.metric, selected.argument))
        if error_and_degrees is None:
            self.how = ALONE_TEXT
            return
        error_of_mean, freedom_degrees = error_and_degrees
        self.how = POOLED_TEXT if self.n < LEAST_REPEATS and freedom_degrees != self.n - 1 else ""
        self.low = self.value - compute_t_975(freedom_degrees) * error_of_mean
        self.high = self.value + compute_t_975(freedom_degrees) * error_of_mean
        argument_text = "" if selected.argument is None else f" {selected.argument}"
        self.draws = draw_mean(
            self.value, error_of_mean, freedom_degrees, f"{selected.metric.name} {selected.row.id}{argument_text}"
        )

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
        draw_lists = [_draw_list(draws_or_value) for draws_or_value in (first_number.draws, other_number.draws)]
        compared_draws = [
            measurements.compare_values(selected, first_draw, other_draw)
            for first_draw, other_draw in zip(*draw_lists, strict=True)
        ]
        defined_draws = [value for value in compared_draws if value is not None]
        if len(defined_draws) < (1 - ERROR_LEVEL) * len(compared_draws):
            self.how = UNBOUNDED_TEXT
            return
        # A comparison is undefined only if it divides by 0 or less. With few repeats, some draws lie so far from the mean. The
        # value grows as its divisor goes to 0, so such a draw gets the largest value of the other draws.
        largest_draw = max(defined_draws)
        filled_draws = np.array([largest_draw if value is None else value for value in compared_draws])
        self.low, self.high = quantile(filled_draws, ERROR_LEVEL), quantile(filled_draws, 1 - ERROR_LEVEL)
        self.draws = self.low if self.low == self.high else filled_draws


def _draw_list(value: Value) -> list[float]:
    assert not isinstance(value, str)
    return list(np.broadcast_to(value, DRAW_COUNT).tolist())
