"""Computes the figures that HolisticTraceAnalysis (HTA) 0.5 gives for a set of traces, including its rounding to microseconds.

The differences between HTA and the exact figures:

- HTA adds start and duration as float64, then rounds every start up and every end down to a whole microsecond. So a kernel
  shorter than 1 us may get a duration of -1 us, which HTA subtracts from the busy time (hta/common/trace_parser.py,
  round_down_time_stamps).
- If all ranks together have at least two profiler steps, HTA leaves out kernels that were launched in or after the last step.
  HTA counts a kernel once for each call before this step that has the correlation of the kernel (hta/common/trace.py,
  _filter_irrelevant_gpu_kernels).
- HTA classifies kernels by their names alone, and takes every event with a stream for a kernel: a `Stream Wait Event` counts as
  compute (hta/utils/utils.py, get_kernel_type). Inductor writes the stream of a Triton kernel, but no correlation, into the
  operator on the CPU. HTA counts this operator as compute in addition to the kernel (hta/common/trace_filter.py treats the
  operator as a call, hta/analyzers treats every event with a stream as a kernel).
- If a time over all kernels is negative after the rounding, HTA stops (an assertion in get_temporal_breakdown).
- HTA rounds the percentage of overlap to two decimals (hta/analyzers/communication_analysis.py).

HTA sorts kernels by their rounded start with an unstable sort (the default of pandas), so the order of kernels with equal
rounded starts depends on the processor. This module uses a fixed order: by rounded start, then as in the file. The order
matters only for kernels of -1 us (tests/support/support_hta.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import collective, intervals
from collect.traces.breakdown import Breakdown, EventTally, count_steps, rename_tallies, tally_events
from collect.traces.lacks import find_lacks
from collect.traces.launches import divide_by_launch
from collect.traces.trace import Trace
from shardlab.errors import InputError

_NCCL_KERNEL = re.compile(r"nccl.*Kernel")
_MEMORY_KERNEL = re.compile(r"Memcpy|Memset|dma")
_NOT_COMPUTE_KERNEL = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|.*Sync")
_SYNC_EVENT_NAMES = ("Event Sync", "Context Sync")
_STEP_PREFIX = "ProfilerStep"
_MOST_KERNEL_ROWS = 20_000_000


class HtaKernels(NamedTuple):
    """The kernels that HTA analyses, with times that are rounded to whole us as HTA rounds them."""

    event_rows: NDArray[np.intp]
    """The index of each kernel in the trace; an index occurs as often as HTA counts the kernel."""
    start_us: NDArray[np.int64]
    end_us: NDArray[np.int64]

    def select(self, chosen_kernels: NDArray[np.bool_]) -> HtaKernels:
        """The chosen kernels. chosen_kernels: a boolean mask."""
        return HtaKernels(*(column[chosen_kernels] for column in self))


def compute_hta_breakdowns(traces: Sequence[Trace]) -> list[Breakdown]:
    """HTA's breakdown for each trace, in the order of the traces. Raises InputError if HTA gives no figures for any one of
    them."""
    breakdowns_or_errors = attempt_breakdowns(traces)
    for breakdown in breakdowns_or_errors:
        if isinstance(breakdown, InputError):
            raise breakdown
    return [breakdown for breakdown in breakdowns_or_errors if isinstance(breakdown, Breakdown)]


def attempt_breakdowns(traces: Sequence[Trace]) -> list[Breakdown | InputError]:
    """For each trace, HTA's breakdown, or an InputError that says why HTA gives no figures for the trace.

    All traces of a run must be passed together, because HTA leaves out the last profiler step only if all traces together have
    at least two steps.
    """
    step_names = {label for trace in traces for label in _list_step_names(trace)}
    breakdowns_or_errors: list[Breakdown | InputError] = []
    for trace in traces:
        try:
            breakdowns_or_errors.append(_compute_breakdown(trace, leave_out_last=len(step_names) > 1))
        except InputError as error:
            breakdowns_or_errors.append(error)
    return breakdowns_or_errors


def _compute_breakdown(trace: Trace, *, leave_out_last: bool) -> Breakdown:
    kernels = _select_kernels(trace, leave_out_last=leave_out_last)
    if not len(kernels.event_rows):
        limit_text = " before the last profiler step" if leave_out_last else ""
        raise InputError(f"{trace.path}: no kernels of a GPU{limit_text}. Allowed with --like-hta: traces of runs on GPUs.")
    is_communicating, is_moving_memory, is_computing = _classify_kernels(trace, kernels)
    communicating_kernels = kernels.select(is_communicating)
    busy_us, communication = _merge_kernels(kernels), _merge_kernels(communicating_kernels)
    compute_intervals = _merge_kernels(kernels.select(is_computing))
    compute_us, memory_us = _sum_lengths(compute_intervals), _sum_lengths(_merge_kernels(kernels.select(is_moving_memory)))
    span_us = int(busy_us[1][-1] - busy_us[0][0])
    idle_us = span_us - _sum_lengths(busy_us)
    us_by_part = {"span": span_us, "compute": compute_us, "communication": _sum_lengths(communication), "idle": idle_us}
    us_by_part["non-compute"] = span_us - compute_us - idle_us
    if negative_times := [f"{part_name} {part_us} us" for part_name, part_us in us_by_part.items() if part_us < 0]:
        raise InputError(
            f"{trace.path}: after HolisticTraceAnalysis' rounding these times are negative: {', '.join(negative_times)}; it "
            "gives no figures then. Use collect trace without --like-hta."
        )
    overlap_us = intervals.measure_intersection(
        intervals.merge_overlapping(*compute_intervals), intervals.merge_overlapping(*communication)
    )
    return Breakdown(
        rank=trace.rank,
        source="gpu",
        steps=max(count_steps(trace) - leave_out_last, 0),
        span_ns=span_us * 1000,
        compute_ns=compute_us * 1000,
        communication_ns=_sum_lengths(communication) * 1000,
        memory_ns=memory_us * 1000 if memory_us >= 0 else None,  # HTA does not compute this time; rounding may make it negative
        non_compute_ns=(span_us - compute_us - idle_us) * 1000,
        idle_ns=idle_us * 1000,
        overlap_ns=overlap_us * 1000,
        collectives=rename_tallies(_tally_kernels(trace, communicating_kernels), _find_collective_name),
        kernels=_tally_kernels(trace, kernels),
        file=trace.path.name,
        lacks=find_lacks(trace, divide_by_launch(trace).is_counted),
        like_hta=True,
    )


def _select_kernels(trace: Trace, *, leave_out_last: bool) -> HtaKernels:
    """The events that HTA analyses because it treats them as kernels, in the order of the file."""
    exact_start_us = _convert_to_us(trace.start_ns)
    start_us = np.ceil(exact_start_us).astype(np.int64)
    is_sync = trace.match_labels(trace.name, [label in _SYNC_EVENT_NAMES for label in trace.labels])
    is_gpu_event = ((trace.stream >= 0) & (trace.correlation >= 0)) | is_sync
    has_stream = trace.stream != -1
    kernel_rows = np.flatnonzero(has_stream)
    if leave_out_last:
        is_call = ~is_gpu_event & trace.match_labels(trace.category, [label != "" for label in trace.labels])
        is_step = is_call & trace.match_labels(trace.name, [_STEP_PREFIX in label for label in trace.labels])
        last_step_us = start_us[is_step].max() if is_step.any() else np.iinfo(np.int64).min
        is_call &= start_us < last_step_us
        launched_ids = np.sort(trace.correlation[is_call])
        kernel_rows = np.flatnonzero(is_gpu_event & has_stream)
        correlation_ids = trace.correlation[kernel_rows]
        call_counts = np.searchsorted(launched_ids, correlation_ids, side="right") - np.searchsorted(
            launched_ids, correlation_ids, side="left"
        )
        if call_counts.sum() > _MOST_KERNEL_ROWS:
            raise InputError(
                f"{trace.path}: HolisticTraceAnalysis would make {call_counts.sum():,} rows of {len(kernel_rows):,} kernels, "
                f"as many events have the same correlation. Allowed with --like-hta: {_MOST_KERNEL_ROWS:,} rows."
            )
        kernel_rows = np.concatenate([np.repeat(kernel_rows, call_counts), np.flatnonzero(is_call & has_stream)])
    end_us = np.floor(exact_start_us[kernel_rows] + _convert_to_us(trace.duration_ns[kernel_rows])).astype(np.int64)
    return HtaKernels(kernel_rows, start_us[kernel_rows], end_us)


def _classify_kernels(trace: Trace, kernels: HtaKernels) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns (which kernels communicate, which kernels move memory, which kernels compute). Some kernels do none of the
    three."""
    label_indexes = trace.name[kernels.event_rows]
    is_communicating = trace.match_labels(label_indexes, [_NCCL_KERNEL.match(label) is not None for label in trace.labels])
    is_moving_memory = ~is_communicating & trace.match_labels(
        label_indexes, [_MEMORY_KERNEL.match(label) is not None for label in trace.labels]
    )
    is_other = trace.match_labels(label_indexes, [_NOT_COMPUTE_KERNEL.match(label) is not None for label in trace.labels])
    return is_communicating, is_moving_memory, ~(is_communicating | is_moving_memory | is_other)


def _convert_to_us(times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """The float64 that is closest to each time in us, which is the number that a JSON parser returns for the decimal text.

    `whole_us` and `fraction / 1000` differ from their exact values by at most 2**-53. No number of thousandths is that close to
    the middle between two neighbouring float64 above 1, so the sum is rounded in the same way as the decimal number.
    """
    whole_us, remainder_ns = np.divmod(times_ns, 1000)
    return whole_us + remainder_ns / 1000


def _merge_kernels(kernels: HtaKernels) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join kernels that touch or overlap into groups, as merge_kernel_intervals of HTA does.

    Returns (start of each group, end of each group), in us.
    A kernel of -1 us may be a group of its own.
    """
    order_by_start = np.argsort(kernels.start_us, kind="stable")
    sorted_starts_us, sorted_ends_us = kernels.start_us[order_by_start], kernels.end_us[order_by_start]
    if not len(sorted_starts_us):
        return sorted_starts_us, sorted_ends_us
    first_of_group = np.flatnonzero(np.r_[True, sorted_starts_us[1:] > np.maximum.accumulate(sorted_ends_us)[:-1]])
    return sorted_starts_us[first_of_group], np.maximum.reduceat(sorted_ends_us, first_of_group)


def _sum_lengths(merged_intervals: tuple[NDArray[np.int64], NDArray[np.int64]]) -> int:
    return int(np.sum(merged_intervals[1] - merged_intervals[0]))


def _tally_kernels(trace: Trace, kernels: HtaKernels) -> list[EventTally]:
    return tally_events(trace, kernels.event_rows, (kernels.end_us - kernels.start_us) * 1000)


def _find_collective_name(kernel_name: str) -> str:
    """The collective that a kernel carries out, from the name of the kernel alone, as in HTA; an unknown name is returned."""
    return collective.find_kernel_collective(kernel_name) or kernel_name


def _list_step_names(trace: Trace) -> list[str]:
    """The names in a trace that HTA treats as profiler steps."""
    return [label for label in trace.labels if _STEP_PREFIX in label]
