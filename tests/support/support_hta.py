"""Bounds on how far HolisticTraceAnalysis (HTA) itself may differ from our figures like HTA, because its sort is unstable.

The order of kernels with equal rounded starts depends on the processor. It matters only for kernels of -1 us. If such a kernel
starts when no earlier kernel runs, and another kernel of 0 us or more has the same rounded start, then HTA subtracts 1 us from
the busy time if the -1 us kernel comes first, and 0 us if it comes later.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import hta


class HtaBounds(NamedTuple):
    """The least and the greatest value that HTA may give for each figure of one rank."""

    span_ns: tuple[int, int]
    compute_ns: tuple[int, int]
    non_compute_ns: tuple[int, int]
    idle_ns: tuple[int, int]
    overlap_pct: tuple[float, float] | None
    """Before HTA rounds it to two decimals; None if there is no communication."""


def bounds_of(traces) -> list[HtaBounds]:
    """The bounds of each trace of a run."""
    step_names = {label for trace in traces for label in hta._list_step_names(trace)}
    breakdowns = hta.compute_hta_breakdowns(traces)
    return [
        compute_bounds(trace, breakdown.overlap_ns // 1000, leave_out_last=len(step_names) > 1)
        for trace, breakdown in zip(traces, breakdowns, strict=True)
    ]


def compute_bounds(trace, overlap_us, *, leave_out_last) -> HtaBounds:
    kernels = hta._select_kernels(trace, leave_out_last=leave_out_last)
    communicating, _, computing = hta._classify_kernels(trace, kernels)
    groups = (kernels, kernels.select(computing), kernels.select(communicating))
    busy, compute, communication = (length_bounds(group) for group in groups)
    span = span_bounds(kernels)
    bounds = [span, compute, (busy[0] - compute[1], busy[1] - compute[0]), (span[0] - busy[1], span[1] - busy[0])]
    overlap_pct = None
    if communication[0] > 0:
        overlap_pct = (100 * overlap_us / communication[1], 100 * overlap_us / communication[0])
    return HtaBounds(*((low * 1000, high * 1000) for low, high in bounds), overlap_pct=overlap_pct)


def order_matters(kernels: hta.HtaKernels) -> NDArray[np.bool_]:
    """Which kernels of -1 us change the total length of the kernels in one order of HTA's unstable sort but not in another
    order."""
    if not (kernels.end_us < kernels.start_us).any():
        return np.zeros(len(kernels.event_rows), np.bool_)
    order = np.argsort(kernels.start_us, kind="stable")
    start, end = kernels.start_us[order], kernels.end_us[order]
    first = np.searchsorted(start, start, side="left")  # the index of the first kernel with the same start
    ended_before = np.r_[np.iinfo(np.int64).min, np.maximum.accumulate(end)][first]
    groups, group = np.unique(first, return_inverse=True)
    longest = np.maximum.reduceat(end, groups)[group]
    matters = np.zeros(len(start), np.bool_)
    matters[order] = (end < start) & (longest >= start) & (start > ended_before)
    return matters


def length_bounds(kernels: hta.HtaKernels) -> tuple[int, int]:
    """Returns (least, greatest) total length of the merged kernels, in us.

    The least length includes all kernels of -1 us whose order matters, the greatest length includes none of these kernels.
    """
    matters = order_matters(kernels)
    high = hta._sum_lengths(hta._merge_kernels(kernels.select(~matters)))
    return high + int(np.sum((kernels.end_us - kernels.start_us)[matters])), high


def span_bounds(kernels: hta.HtaKernels) -> tuple[int, int]:
    """Returns (least, greatest) span in us, from the start of the first group of kernels to the end of the last group.

    HTA also sorts the groups with an unstable sort, so the last group may be a kernel of -1 us.
    """
    matters = order_matters(kernels)
    group_starts, group_ends = hta._merge_kernels(kernels.select(~matters))
    low = int(kernels.end_us[matters & (kernels.start_us == group_starts[-1])].min(initial=group_ends[-1]))
    return low - int(group_starts[0]), int(group_ends[-1] - group_starts[0])
