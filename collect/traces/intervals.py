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
    order_by_start = np.argsort(start[is_nonempty])
    start, end = start[is_nonempty][order_by_start], np.maximum.accumulate(end[is_nonempty][order_by_start])
    if not len(start):
        return Intervals(start, end)
    is_gap = start[1:] > end[:-1]
    return Intervals(start[np.r_[True, is_gap]], end[np.r_[is_gap, True]])


def merge_events(trace: Trace, chosen_events: NDArray[np.bool_] | NDArray[np.intp]) -> Intervals:
    """The time in which at least one of the chosen events runs. chosen_events: a boolean mask or indexes."""
    return merge_overlapping(trace.start_ns[chosen_events], trace.end_ns[chosen_events])


def measure_intersection(intervals: Intervals, other_intervals: Intervals) -> int:
    """The length of the intersection of two sets of intervals: the sum of their lengths minus the length of their union."""
    return intervals.length + other_intervals.length - unite_intervals(intervals, other_intervals).length


def unite_intervals(intervals: Intervals, other: Intervals) -> Intervals:
    """The union of two sets of intervals."""
    return merge_overlapping(np.concatenate([intervals.start, other.start]), np.concatenate([intervals.end, other.end]))


def subtract_intervals(intervals: Intervals, other_intervals: Intervals) -> Intervals:
    """The part of the set `intervals` that is not in the set `other_intervals`."""
    interval_edges = np.sort(np.concatenate([intervals.start, intervals.end, other_intervals.start, other_intervals.end]))
    edge_starts, edge_ends = interval_edges[:-1], interval_edges[1:]
    is_in_result = find_covered(intervals, edge_starts) & ~find_covered(other_intervals, edge_starts)
    return merge_overlapping(edge_starts[is_in_result], edge_ends[is_in_result])


def clip_intervals(intervals: Intervals, range_start: int, range_end: int) -> Intervals:
    """The part of the set `intervals` that lies within [start, end)."""
    return merge_overlapping(np.maximum(intervals.start, range_start), np.minimum(intervals.end, range_end))


def complement_intervals(intervals: Intervals, range_start: int, range_end: int) -> Intervals:
    """The part of [start, end) that is not in the set `intervals`. The set `intervals` must lie within [start, end)."""
    return merge_overlapping(np.concatenate([[range_start], intervals.end]), np.concatenate([intervals.start, [range_end]]))


def intersect_intervals(intervals: Intervals, other_intervals: Intervals) -> Intervals:
    """The intersection of two sets of intervals."""
    interval_edges = np.sort(np.concatenate([intervals.start, intervals.end, other_intervals.start, other_intervals.end]))
    edge_starts, edge_ends = interval_edges[:-1], interval_edges[1:]
    is_in_result = find_covered(intervals, edge_starts) & find_covered(other_intervals, edge_starts)
    return merge_overlapping(edge_starts[is_in_result], edge_ends[is_in_result])


def measure_length_before(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each point, the length of the part of the set before the point. Shape (number of points,).

    So the length of the set between two points is the difference between the results for the two points.
    """
    ended_count = np.searchsorted(intervals.end, points, side="right")  # the number of intervals that end before the point
    cumulative_lengths = np.concatenate([[0], np.cumsum(intervals.end - intervals.start)])
    next_start = np.append(intervals.start, np.iinfo(np.int64).max)[ended_count]
    return np.asarray(cumulative_lengths[ended_count] + np.where(points > next_start, points - next_start, 0), np.int64)


def find_covered(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which points lie in one of the intervals. The end of an interval does not belong to the interval. Shape (number of
    points,)."""
    begun_count = np.searchsorted(intervals.start, points, side="right")
    ended_count = np.searchsorted(intervals.end, points, side="right")
    return np.asarray(begun_count > ended_count)
