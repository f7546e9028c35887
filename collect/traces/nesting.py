"""Finds which span of a thread contains a moment, where spans may be nested: the innermost span or the outermost span."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces.details import EventSpans

MOST_LEVELS = 64  # a span inside this number of other spans, or more, is ignored


class Nesting(NamedTuple):
    """How some spans are nested in each other."""

    parent: NDArray[np.intp]
    """For each span, the index of the innermost span of the same thread that contains it; -1 if no span contains it, -2 if the
    span is ignored because it is nested too deep."""
    segments: EventSpans
    """The times in which a span is the innermost span, disjoint on each thread. `segments.name` is the index of this span."""


def compute_nesting(spans: EventSpans) -> Nesting:
    """Compute how these spans are nested. If a span ends after the span in which it starts, it is cut at the end of that
    outer span."""
    parent = np.full(len(spans.start_ns), -1, np.intp)
    pieces: list[tuple[int, int, int, int]] = []
    running: list[tuple[int, int]] = []  # (index of the span, its end), the innermost span last
    order = np.lexsort((-spans.end_ns, spans.start_ns, spans.thread))
    columns = (order, spans.thread[order], spans.start_ns[order], spans.end_ns[order])
    written_until_ns = current_thread = 0

    def end_until(moment: int | None) -> None:
        """Write the segments of the running spans until this moment; None: until all running spans have ended."""
        nonlocal written_until_ns
        while running:
            index, end = running[-1]
            until = end if moment is None else min(end, moment)
            if until > written_until_ns:
                pieces.append((index, current_thread, written_until_ns, until))
                written_until_ns = until
            if moment is not None and end > moment:
                return
            running.pop()

    for index, thread, start, end in zip(*(column.tolist() for column in columns), strict=True):
        end_until(start if thread == current_thread else None)
        current_thread, written_until_ns = thread, start
        if len(running) >= MOST_LEVELS:
            parent[index] = -2
            continue
        if running:
            parent[index] = running[-1][0]
            end = min(end, running[-1][1])
        running.append((index, end))
    end_until(None)
    segments = np.array(pieces, np.int64).reshape(-1, 4)
    return Nesting(
        parent, EventSpans(segments[:, 0].astype(np.int32), segments[:, 1].astype(np.int32), segments[:, 2], segments[:, 3])
    )


def find_containing_spans(spans: EventSpans, thread: NDArray[np.int32], moment: NDArray[np.int64]) -> NDArray[np.intp]:
    """For each moment, the index of the span that contains it on its thread; -1 if there is none. Shape (number of moments,).

    spans: disjoint on each thread. thread, moment: the thread and the time of each moment.
    """
    span_count = len(spans.start_ns)
    threads = np.concatenate([spans.thread, thread])
    moments = np.concatenate([spans.start_ns, moment])
    is_moment = np.arange(len(threads)) >= span_count
    order = np.lexsort((is_moment, moments, threads))
    last = np.maximum.accumulate(np.where(order < span_count, np.arange(len(order)), -1))
    span = np.where(last >= 0, order[np.maximum(last, 0)], -1)
    inside = (span >= 0) & (threads[span] == threads[order])
    inside[inside] = spans.end_ns[span[inside]] > moments[order[inside]]
    span_of_moment = np.full(len(threads), -1, np.intp)
    span_of_moment[order] = np.where(inside, span, -1)
    return span_of_moment[span_count:]


def is_innermost(spans: EventSpans) -> NDArray[np.bool_]:
    """Which spans are innermost: no other span of the same thread starts within them."""
    order = np.lexsort((-spans.end_ns, spans.start_ns, spans.thread))
    thread, start, end = spans.thread[order], spans.start_ns[order], spans.end_ns[order]
    contains = (thread[1:] == thread[:-1]) & (start[1:] < end[:-1])
    mask = np.ones(len(order), bool)
    mask[order[:-1][contains]] = False
    return mask


def is_outermost(spans: EventSpans) -> NDArray[np.bool_]:
    """Which spans are outermost: they do not start within another span of the same thread."""
    mask = np.zeros(len(spans.start_ns), bool)
    order = np.lexsort((-spans.end_ns, spans.start_ns, spans.thread))
    columns = (order, spans.thread[order], spans.start_ns[order], spans.end_ns[order])
    current_thread, span_end = -1, 0
    for index, thread, start, end in zip(*(column.tolist() for column in columns), strict=True):
        if thread != current_thread or start >= span_end:
            mask[index] = True
            current_thread, span_end = thread, end
    return mask


def union_lengths(group: NDArray[np.intp], start: NDArray[np.int64], end: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """For each group of intervals [start, end), the length of their union. Shape (groups,).

    group: for each interval, the number of its group, from 0. groups: the number of groups.
    """
    totals = np.zeros(groups, np.int64)
    if not len(group):
        return totals
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    distinct_ends, rank = np.unique(end, return_inverse=True)
    # For each interval, the greatest end so far in its group. The number that is accumulated is (group, rank of the end) as one
    # number. Groups are in ascending order, so the ends of an earlier group never exceed those of a later group.
    reached = distinct_ends[np.maximum.accumulate(group * len(distinct_ends) + rank) % len(distinct_ends)]
    earlier = np.concatenate([start[:1], reached[:-1]])
    earlier[1:][group[1:] != group[:-1]] = np.iinfo(np.int64).min
    np.add.at(totals, group, np.maximum(0, end - np.maximum(start, earlier)))
    return totals
