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


def union(start: NDArray[np.int64], end: NDArray[np.int64]) -> Intervals:
    """The union of [start[i], end[i]) in any order; what has no length adds nothing."""
    some = end > start
    order = np.argsort(start[some])
    start, end = start[some][order], np.maximum.accumulate(end[some][order])
    if not len(start):
        return Intervals(start, end)
    gap = start[1:] > end[:-1]
    return Intervals(start[np.r_[True, gap]], end[np.r_[gap, True]])


def of(trace: Trace, rows: NDArray[np.bool_]) -> Intervals:
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
    edges = np.unique(np.concatenate([one.start, one.end, other.start, other.end]))
    start, end = edges[:-1], edges[1:]
    kept = covers(one, start) & ~covers(other, start)
    return union(start[kept], end[kept])


def within(one: Intervals, start: int, end: int) -> Intervals:
    """What of `one` lies in [start, end)."""
    return union(np.maximum(one.start, start), np.minimum(one.end, end))


def covers(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which points lie in one of the intervals; its end does not. Shape (points,)."""
    begun = np.searchsorted(intervals.start, points, side="right")
    ended = np.searchsorted(intervals.end, points, side="right")
    return np.asarray(begun > ended)
