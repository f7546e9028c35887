"""Sets of half-open intervals on a line of integers: their union and its length, exactly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces.trace import Trace


class Intervals(NamedTuple):
    """Disjoint, in order, none empty, none touching the next: start[i] < end[i] < start[i + 1]."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]

    @property
    def length(self) -> int:
        """The sum of all lengths."""
        return int(np.sum(self.end - self.start))


NOTHING = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: NDArray[np.int64], end: NDArray[np.int64]) -> Intervals:
    """The union of [start[i], end[i]) in any order; what has no length adds nothing."""
    some = end > start
    order = np.argsort(start[some])
    start, end = start[some][order], np.maximum.accumulate(end[some][order])
    if not len(start):
        return Intervals(start, end)
    gap = start[1:] > end[:-1]
    return Intervals(start[np.r_[True, gap]], end[np.r_[gap, True]])


def of(trace: Trace, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Intervals:
    """The union of the chosen events."""
    return union(trace.start_ns[rows], trace.end_ns[rows])


def both(one: Intervals, other: Intervals) -> int:
    """The length of the intersection: |A| + |B| - |A or B|."""
    return one.length + other.length - either(one, other).length


def either(one: Intervals, other: Intervals) -> Intervals:
    """The union of both sets."""
    return union(np.concatenate([one.start, other.start]), np.concatenate([one.end, other.end]))


def without(one: Intervals, other: Intervals) -> Intervals:
    """What of `one` is not in `other`."""
    edges = np.sort(np.concatenate([one.start, one.end, other.start, other.end]))
    start, end = edges[:-1], edges[1:]
    kept = covers(one, start) & ~covers(other, start)
    return union(start[kept], end[kept])


def within(one: Intervals, start: int, end: int) -> Intervals:
    """What of `one` lies in [start, end)."""
    return union(np.maximum(one.start, start), np.minimum(one.end, end))


def complement(one: Intervals, start: int, end: int) -> Intervals:
    """What of [start, end) is not in `one`, which lies within it."""
    return union(np.concatenate([[start], one.end]), np.concatenate([one.start, [end]]))


def common(one: Intervals, other: Intervals) -> Intervals:
    """The intersection of both sets."""
    edges = np.sort(np.concatenate([one.start, one.end, other.start, other.end]))
    start, end = edges[:-1], edges[1:]
    kept = covers(one, start) & covers(other, start)
    return union(start[kept], end[kept])


def before(one: Intervals, points: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of the set lies before each point, in the order of the points; shape (number of points,).

    The length of the set within [a, b) is the value of b minus the value of a.
    """
    ended = np.searchsorted(one.end, points, side="right")  # intervals that lie before the point
    lengths = np.concatenate([[0], np.cumsum(one.end - one.start)])
    start = np.append(one.start, np.iinfo(np.int64).max)[ended]
    return np.asarray(lengths[ended] + np.where(points > start, points - start, 0), np.int64)


def covers(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which points lie in one of the intervals; its end does not. Shape (points,)."""
    begun = np.searchsorted(intervals.start, points, side="right")
    ended = np.searchsorted(intervals.end, points, side="right")
    return np.asarray(begun > ended)
