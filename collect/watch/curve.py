"""A line of a figure that grows while a run goes on and never has more than a fixed number of points."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

MOST_POINTS = 300  # of a figure that is half as wide as the page; there are up to twice as many before points are merged
GAP_PERIODS = 3.0  # points further apart than this many usual distances are not connected


class LiveCurve:
    """Means over stretches of equally many values, in the order of x. If there are too many stretches, every two become one."""

    def __init__(self) -> None:
        self._x: list[float] = []  # the last x of each stretch
        self._means: list[float] = []
        self._size = 1  # values of a stretch
        self._sum, self._count, self._last_x = 0.0, 0, 0.0  # of the stretch that is not complete

    def add(self, x: float, value: float) -> None:
        """Add the next value."""
        self._sum, self._count, self._last_x = self._sum + value, self._count + 1, x
        if self._count < self._size:
            return
        self._x.append(x)
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._x) >= 2 * MOST_POINTS:
            self._x = self._x[1::2]
            self._means = [(first + second) / 2 for first, second in zip(self._means[::2], self._means[1::2], strict=True)]
            self._size *= 2

    def points(self) -> tuple[list[float], list[float]]:
        """(x, mean) of all values so far."""
        if not self._count:
            return list(self._x), list(self._means)
        return [*self._x, self._last_x], [*self._means, self._sum / self._count]

    def with_gaps(self) -> tuple[list[float], list[float | None]]:
        """(x, mean), with None between two points that are further apart than usual."""
        x, means = self.points()
        if len(x) < 3:
            return x, list(means)
        most = GAP_PERIODS * median(second - first for first, second in pairwise(x))
        shown_x, shown = [x[0]], list[float | None]([means[0]])
        for before, at, mean in zip(x, x[1:], means[1:]):
            if at - before > most:
                shown_x.append((before + at) / 2)
                shown.append(None)
            shown_x.append(at)
            shown.append(mean)
        return shown_x, shown
