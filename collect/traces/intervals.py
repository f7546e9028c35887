"""Defines sets of half-open intervals [start, end) of integers, with exact set operations and lengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces.trace import Trace


class Intervals(NamedTuple):
    """A set of intervals. They are sorted, not empty, and neither overlap nor touch: start[i] < end[i] < start[i + 1]."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]

    @property
    def length(self) -> int:
        """The sum of the lengths of all intervals in the set."""
        return int(np.sum(self.end - self.start))


NOTHING = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: NDArray[np.int64], end: NDArray[np.int64]) -> Intervals:
    """The union of the intervals [start[i], end[i]), which may overlap and be in any order. Empty intervals are ignored."""
    some = end > start
    order = np.argsort(start[some])
    start, end = start[some][order], np.maximum.accumulate(end[some][order])
    if not len(start):
        return Intervals(start, end)
    gap = start[1:] > end[:-1]
    return Intervals(start[np.r_[True, gap]], end[np.r_[gap, True]])


def of(trace: Trace, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Intervals:
    """The time in which at least one of the chosen events runs. rows: the chosen events, as a boolean mask or as indexes."""
    return union(trace.start_ns[rows], trace.end_ns[rows])


def both(one: Intervals, other: Intervals) -> int:
    """The length of the intersection of two sets of intervals: the sum of their lengths minus the length of their union."""
    return one.length + other.length - either(one, other).length


def either(one: Intervals, other: Intervals) -> Intervals:
    """The union of two sets of intervals."""
    return union(np.concatenate([one.start, other.start]), np.concatenate([one.end, other.end]))


def without(one: Intervals, other: Intervals) -> Intervals:
    """The part of the set `one` that is not in the set `other`."""
    edges = np.sort(np.concatenate([one.start, one.end, other.start, other.end]))
    start, end = edges[:-1], edges[1:]
    kept = covers(one, start) & ~covers(other, start)
    return union(start[kept], end[kept])


def within(one: Intervals, start: int, end: int) -> Intervals:
    """The part of the set `one` that lies within [start, end)."""
    return union(np.maximum(one.start, start), np.minimum(one.end, end))


def complement(one: Intervals, start: int, end: int) -> Intervals:
    """The part of [start, end) that is not in the set `one`. The set `one` must lie within [start, end)."""
    return union(np.concatenate([[start], one.end]), np.concatenate([one.start, [end]]))


def common(one: Intervals, other: Intervals) -> Intervals:
    """The intersection of two sets of intervals."""
    edges = np.sort(np.concatenate([one.start, one.end, other.start, other.end]))
    start, end = edges[:-1], edges[1:]
    kept = covers(one, start) & covers(other, start)
    return union(start[kept], end[kept])


def before(one: Intervals, points: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each point, the length of the part of the set before the point. Shape (number of points,).

    So the length of the set between two points is the difference between the results for the two points.
    """
    ended = np.searchsorted(one.end, points, side="right")  # the number of intervals that end before the point
    lengths = np.concatenate([[0], np.cumsum(one.end - one.start)])
    start = np.append(one.start, np.iinfo(np.int64).max)[ended]
    return np.asarray(lengths[ended] + np.where(points > start, points - start, 0), np.int64)


def covers(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which points lie in one of the intervals. The end of an interval does not belong to the interval. Shape (number of
    points,)."""
    begun = np.searchsorted(intervals.start, points, side="right")
    ended = np.searchsorted(intervals.end, points, side="right")
    return np.asarray(begun > ended)
