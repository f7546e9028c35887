"""Defines a line of a figure that grows while a run goes on, and that never has more than a fixed number of points."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

MOST_POINTS = 300  # a curve with twice this many points is merged to this number, which is enough for half the page's width
GAP_PERIODS = 3.0  # two points are not connected if their distance is more than this many times the median distance


class LiveCurve:
    """A curve of means. Each point is the mean over a group of values, which are added in the order of x.

    All groups have the same number of values. If there are too many groups, every two neighbouring groups are merged.
    """

    def __init__(self) -> None:
        self._group_x: list[float] = []  # the last x of each group
        self._means: list[float] = []
        self._group_size = 1  # the number of values in a group
        self._open_sum, self._open_count, self._last_x = 0.0, 0, 0.0  # of the values in the incomplete last group

    def add(self, x: float, value: float) -> None:
        """Add the next value. x: its x coordinate, not less than the x of the previous value."""
        self._open_sum, self._open_count, self._last_x = self._open_sum + value, self._open_count + 1, x
        if self._open_count < self._group_size:
            return
        self._group_x.append(x)
        self._means.append(self._open_sum / self._open_count)
        self._open_sum, self._open_count = 0.0, 0
        if len(self._group_x) >= 2 * MOST_POINTS:
            self._group_x = self._group_x[1::2]
            self._means = [(first + second) / 2 for first, second in zip(self._means[::2], self._means[1::2], strict=True)]
            self._group_size *= 2

    def get_points(self) -> tuple[list[float], list[float]]:
        """Returns (x of each group, mean of each group), including the last group, which may be incomplete."""
        if not self._open_count:
            return list(self._group_x), list(self._means)
        return [*self._group_x, self._last_x], [*self._means, self._open_sum / self._open_count]

    def get_points_with_gaps(self) -> tuple[list[float], list[float | None]]:
        """The same as `get_points`, but with None between two points that are much further apart than usual (GAP_PERIODS)."""
        group_x, group_means = self.get_points()
        if len(group_x) < 3:
            return group_x, list(group_means)
        longest_distance = GAP_PERIODS * median(right_x - left_x for left_x, right_x in pairwise(group_x))
        curve_x, curve_means = [group_x[0]], list[float | None]([group_means[0]])
        for previous_x, next_x, mean in zip(group_x, group_x[1:], group_means[1:]):
            if next_x - previous_x > longest_distance:
                curve_x.append((previous_x + next_x) / 2)
                curve_means.append(None)
            curve_x.append(next_x)
            curve_means.append(mean)
        return curve_x, curve_means
