"""Finds which span of a thread contains a moment, where spans may be nested: the innermost span or the outermost span."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces.details import EventSpans
from collect.traces.trace import Trace

MOST_LEVELS = 64  # a span inside this number of other spans, or more, is ignored


class Nesting(NamedTuple):
    """How some spans are nested in each other."""

    parent: NDArray[np.intp]
    """For each span, the index of the innermost span of the same thread that contains it; -1 if no span contains it, -2 if the
    span is ignored because it is nested too deep."""
    segments: EventSpans
    """The times in which a span is the innermost span, disjoint on each thread. `segments.name` is the index of this span."""


def select_spans(trace: Trace, rows: NDArray[np.intp] | NDArray[np.bool_]) -> EventSpans:
    """The chosen events of a trace as spans. rows: the chosen events, as indexes or as a boolean mask."""
    return EventSpans(trace.name[rows], trace.thread[rows], trace.start_ns[rows], trace.end_ns[rows])


def compute_nesting(spans: EventSpans) -> Nesting:
    """Compute how these spans are nested. If a span ends after the span in which it starts, it is cut at the end of that
    outer span."""
    parent_of_span = np.full(len(spans.start_ns), -1, np.intp)
    segment_rows: list[tuple[int, int, int, int]] = []
    running_spans: list[tuple[int, int]] = []  # (index of the span, its end), the innermost span last
    span_order = np.lexsort((-spans.end_ns, spans.start_ns, spans.thread))
    span_columns = (span_order, spans.thread[span_order], spans.start_ns[span_order], spans.end_ns[span_order])
    written_until_ns = current_thread = 0

    def end_until(moment_ns: int | None) -> None:
        """Write the segments of the running spans until this moment; None: until all running spans have ended."""
        nonlocal written_until_ns
        while running_spans:
            span_index, span_end = running_spans[-1]
            segment_end = span_end if moment_ns is None else min(span_end, moment_ns)
            if segment_end > written_until_ns:
                segment_rows.append((span_index, current_thread, written_until_ns, segment_end))
                written_until_ns = segment_end
            if moment_ns is not None and span_end > moment_ns:
                return
            running_spans.pop()

    for span_number, thread, start_ns, end_ns in zip(*(column.tolist() for column in span_columns), strict=True):
        end_until(start_ns if thread == current_thread else None)
        current_thread, written_until_ns = thread, start_ns
        if len(running_spans) >= MOST_LEVELS:
            parent_of_span[span_number] = -2
            continue
        if running_spans:
            parent_of_span[span_number] = running_spans[-1][0]
            end_ns = min(end_ns, running_spans[-1][1])
        running_spans.append((span_number, end_ns))
    end_until(None)
    segments = np.array(segment_rows, np.int64).reshape(-1, 4)
    return Nesting(
        parent_of_span,
        EventSpans(segments[:, 0].astype(np.int32), segments[:, 1].astype(np.int32), segments[:, 2], segments[:, 3]),
    )


def find_containing_spans(spans: EventSpans, thread: NDArray[np.int32], moments_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """For each moment, the index of the span that contains it on its thread; -1 if there is none. Shape (number of moments,).

    spans: disjoint on each thread. thread, moments_ns: the thread and the time of each moment.
    """
    span_count = len(spans.start_ns)
    all_threads = np.concatenate([spans.thread, thread])
    all_moments = np.concatenate([spans.start_ns, moments_ns])
    is_moment = np.arange(len(all_threads)) >= span_count
    order_by_time = np.lexsort((is_moment, all_moments, all_threads))
    last_span = np.maximum.accumulate(np.where(order_by_time < span_count, np.arange(len(order_by_time)), -1))
    span_by_entry = np.where(last_span >= 0, order_by_time[np.maximum(last_span, 0)], -1)
    is_inside = (span_by_entry >= 0) & (all_threads[span_by_entry] == all_threads[order_by_time])
    is_inside[is_inside] = spans.end_ns[span_by_entry[is_inside]] > all_moments[order_by_time[is_inside]]
    span_by_moment = np.full(len(all_threads), -1, np.intp)
    span_by_moment[order_by_time] = np.where(is_inside, span_by_entry, -1)
    return span_by_moment[span_count:]


def find_innermost_spans(spans: EventSpans) -> NDArray[np.bool_]:
    """Which spans are innermost: no other span of the same thread starts within them."""
    span_order = np.lexsort((-spans.end_ns, spans.start_ns, spans.thread))
    thread_by_span, starts_ns, ends_ns = spans.thread[span_order], spans.start_ns[span_order], spans.end_ns[span_order]
    contains_next = (thread_by_span[1:] == thread_by_span[:-1]) & (starts_ns[1:] < ends_ns[:-1])
    innermost_mask = np.ones(len(span_order), bool)
    innermost_mask[span_order[:-1][contains_next]] = False
    return innermost_mask


def find_outermost_spans(spans: EventSpans) -> NDArray[np.bool_]:
    """Which spans are outermost: they do not start within another span of the same thread."""
    outermost_mask = np.zeros(len(spans.start_ns), bool)
    span_order = np.lexsort((-spans.end_ns, spans.start_ns, spans.thread))
    span_columns = (span_order, spans.thread[span_order], spans.start_ns[span_order], spans.end_ns[span_order])
    current_thread, outer_end_ns = -1, 0
    for span_index, thread, start_ns, end_ns in zip(*(column.tolist() for column in span_columns), strict=True):
        if thread != current_thread or start_ns >= outer_end_ns:
            outermost_mask[span_index] = True
            current_thread, outer_end_ns = thread, end_ns
    return outermost_mask


def measure_unions(
    group_by_interval: NDArray[np.intp], start: NDArray[np.int64], ends_ns: NDArray[np.int64], group_count: int
) -> NDArray[np.int64]:
    """For each group of intervals [start, end), the length of their union. Shape (groups,).

    group_by_interval: for each interval, the number of its group, from 0. group_count: the number of groups.
    """
    union_ns = np.zeros(group_count, np.int64)
    if not len(group_by_interval):
        return union_ns
    interval_order = np.lexsort((start, group_by_interval))
    group_by_interval, start, ends_ns = (group_by_interval[interval_order], start[interval_order], ends_ns[interval_order])
    distinct_ends, end_rank = np.unique(ends_ns, return_inverse=True)
    # For each interval, the greatest end so far in its group. The number that is accumulated is (group, rank of the end) as one
    # number. Groups are in ascending order, so the ends of an earlier group never exceed those of a later group.
    reached_end = distinct_ends[np.maximum.accumulate(group_by_interval * len(distinct_ends) + end_rank) % len(distinct_ends)]
    earlier_end = np.concatenate([start[:1], reached_end[:-1]])
    earlier_end[1:][group_by_interval[1:] != group_by_interval[:-1]] = np.iinfo(np.int64).min
    np.add.at(union_ns, group_by_interval, np.maximum(0, ends_ns - np.maximum(start, earlier_end)))
    return union_ns
