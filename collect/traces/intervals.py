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


NO_INTERVALS = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def merge_overlapping(start: NDArray[np.int64], end: NDArray[np.int64]) -> Intervals:
    """The union of the intervals [start[i], end[i]), which may overlap and be in any order. Empty intervals are ignored."""
    is_nonempty = end > start
    start_order = np.argsort(start[is_nonempty])
    start, end = start[is_nonempty][start_order], np.maximum.accumulate(end[is_nonempty][start_order])
    if not len(start):
        return Intervals(start, end)
    is_gap = start[1:] > end[:-1]
    return Intervals(start[np.r_[True, is_gap]], end[np.r_[is_gap, True]])


def event_spans(trace: Trace, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Intervals:
    """The time in which at least one of the chosen events runs. rows: the chosen events, as a boolean mask or as indexes."""
    return merge_overlapping(trace.start_ns[rows], trace.end_ns[rows])


def intersection_length(intervals: Intervals, other: Intervals) -> int:
    """The length of the intersection of two sets of intervals: the sum of their lengths minus the length of their union."""
    return intervals.length + other.length - unite_intervals(intervals, other).length


def unite_intervals(intervals: Intervals, other: Intervals) -> Intervals:
    """The union of two sets of intervals."""
    return merge_overlapping(np.concatenate([intervals.start, other.start]), np.concatenate([intervals.end, other.end]))


def subtract_intervals(intervals: Intervals, other: Intervals) -> Intervals:
    """The part of the set `intervals` that is not in the set `other`."""
    edges = np.sort(np.concatenate([intervals.start, intervals.end, other.start, other.end]))
    start, end = edges[:-1], edges[1:]
    in_result = covers(intervals, start) & ~covers(other, start)
    return merge_overlapping(start[in_result], end[in_result])


def clip_intervals(intervals: Intervals, start: int, end: int) -> Intervals:
    """The part of the set `intervals` that lies within [start, end)."""
    return merge_overlapping(np.maximum(intervals.start, start), np.minimum(intervals.end, end))


def complement(intervals: Intervals, start: int, end: int) -> Intervals:
    """The part of [start, end) that is not in the set `intervals`. The set `intervals` must lie within [start, end)."""
    return merge_overlapping(np.concatenate([[start], intervals.end]), np.concatenate([intervals.start, [end]]))


def intersect_intervals(intervals: Intervals, other: Intervals) -> Intervals:
    """The intersection of two sets of intervals."""
    edges = np.sort(np.concatenate([intervals.start, intervals.end, other.start, other.end]))
    start, end = edges[:-1], edges[1:]
    in_result = covers(intervals, start) & covers(other, start)
    return merge_overlapping(start[in_result], end[in_result])


def length_before(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each point, the length of the part of the set before the point. Shape (number of points,).

    So the length of the set between two points is the difference between the results for the two points.
    """
    ended_counts = np.searchsorted(intervals.end, points, side="right")  # the number of intervals that end before the point
    lengths_before = np.concatenate([[0], np.cumsum(intervals.end - intervals.start)])
    start = np.append(intervals.start, np.iinfo(np.int64).max)[ended_counts]
    return np.asarray(lengths_before[ended_counts] + np.where(points > start, points - start, 0), np.int64)


def covers(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which points lie in one of the intervals. The end of an interval does not belong to the interval. Shape (number of
    points,)."""
    begun_count = np.searchsorted(intervals.start, points, side="right")
    ended_counts = np.searchsorted(intervals.end, points, side="right")
    return np.asarray(begun_count > ended_counts)
