"""Divides the time of a GPU by category of work and by operator: own work, and work of all that an operator calls.

A kernel belongs to the operator that runs on the launching thread when the kernel is launched (its own kernel), and to all
operators around this operator. Times are sums of durations: kernels that run at the same time count twice. On a CPU, the own
time of an operator is the time in which it runs and no operator that it calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo
from collect.traces.activities import Activities
from collect.traces.attention import find_operator_backend
from collect.traces.input_shapes import parse_list
from collect.traces.kernel_categories import CATEGORIES, WorkCategory, classify_kernel, classify_operator
from collect.traces.nesting import MOST_LEVELS, find_containing_spans, select_spans
from collect.traces.operator_work import compute_least_ns, count_work, find_precision
from collect.traces.rank_sums import merge_rows
from collect.traces.trace import Trace

_MOST_ROW_WORK = 1 << 56  # the most FLOPs or bytes of a row: more need over a minute of a fast GPU, so the trace is damaged
MOST_KERNELS = 2  # the most kernel names in an OperatorTime


class CategoryTime(msgspec.Struct, frozen=True):
    """The work of one category."""

    category: WorkCategory
    """The category, such as `convolution`."""
    count: int
    """The number of kernels and memory operations; on a CPU, of operators."""
    total_ns: int
    """The sum of their durations; on a CPU, of the own times of the operators."""


class OperatorTime(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of an operator with the same inputs. Times are in ns; those of a GPU are None on a CPU.

    An operator that launches nothing itself has one row, without inputs.
    """

    operator: str
    """Its name, such as aten::add; "": kernels that were launched outside of operators, one row for each category."""
    category: WorkCategory
    """The category of most of its own kernels' time."""
    shapes: str
    """The shapes of its inputs as JSON; "" if the trace does not record them."""
    types: list[str]
    """The types of its inputs."""
    kernels: list[str]
    """The names of at most MOST_KERNELS of its own kernels, the kernel with the longest time first."""
    calls: int
    """The number of its calls; if some launch work themselves, the number of these."""
    kernel_ns: int | None
    """The time of its own kernels."""
    copy_ns: int | None
    """The time of its own copies and memory sets."""
    with_children_ns: int | None
    """The time of all kernels and memory operations that were launched during its calls."""
    self_host_ns: int
    """The time of the host in the operator, without the operators that it calls."""
    host_ns: int
    """The time of the host in the operator."""
    flops: int | None
    """The FLOPs of all calls; None: no formula (collect/traces/operator_work.py)."""
    bytes: int | None
    """The bytes that all calls must at least read and write."""
    least_ns: int | None
    """The least time for this work by the data sheet of the GPU; None: not known."""

    @property
    def own_ns(self) -> int:
        """The own time: of its kernels and memory operations, or on a CPU of the host."""
        return self.self_host_ns if self.kernel_ns is None else self.kernel_ns + (self.copy_ns or 0)

    @property
    def inclusive_ns(self) -> int:
        """The time with all operators that it calls."""
        return self.host_ns if self.with_children_ns is None else self.with_children_ns

    @property
    def flops_per_s(self) -> float | None:
        """The achieved FLOP/s."""
        return self.flops / self.kernel_ns * 1e9 if self.flops is not None and self.kernel_ns else None

    @property
    def bytes_per_s(self) -> float | None:
        """The bytes that must be moved, divided by the time of the own kernels."""
        return self.bytes / self.kernel_ns * 1e9 if self.bytes is not None and self.kernel_ns else None

    @property
    def precision(self) -> str:
        """The precision in which it computes: fp32, tf32, bf16 or fp16; "" if it is not known."""
        return find_precision(self.types, self.kernels)

    @property
    def roofline_pct(self) -> float | None:
        """The least time as a share of the time of the own kernels, in percent; None: not known."""
        return 100 * self.least_ns / self.kernel_ns if self.least_ns is not None and self.kernel_ns else None


def sum_categories(times: Iterable[CategoryTime]) -> list[CategoryTime]:
    """Categories of several ranks, added up, the longest time first."""
    return sorted(merge_rows(times, lambda time: time.category, ("count", "total_ns")), key=lambda time: -time.total_ns)


def sum_operators(operators: Iterable[OperatorTime]) -> list[OperatorTime]:
    """Operators of several ranks, added up by name and inputs, the longest own time first."""
    summed_fields = (
        "calls",
        "kernel_ns",
        "copy_ns",
        "with_children_ns",
        "self_host_ns",
        "host_ns",
        "flops",
        "bytes",
        "least_ns",
    )
    summed_operators = merge_rows(operators, lambda row: (row.operator or row.category, row.shapes, *row.types), summed_fields)
    return sorted(summed_operators, key=lambda row: (-row.own_ns, -row.inclusive_ns, row.operator, row.shapes))


class _CallTree(NamedTuple):
    """The operators of the profiled steps, and what is launched in them. Calls are indexes in `rows`."""

    rows: NDArray[np.intp]
    """The calls of operators as indexes of events in the trace."""
    self_ns: NDArray[np.int64]
    """For each call, its duration without the calls in it."""
    launchers: list[NDArray[np.intp]]
    """For each level, from the outermost: for each launch, the call that contains it; -1 if none does."""
    innermost: NDArray[np.intp]
    """For each launch, the innermost call that contains it; -1 if none does."""


def measure_operators(trace: Trace, activities: Activities) -> tuple[list[CategoryTime], list[OperatorTime]]:
    """The time of a rank by category and by operator, the longest first."""
    if activities.source == "gpu":
        call_tree = _build_tree(trace, activities.launch_row)
        category_by_event = _classify_events(trace, activities, call_tree)
        counts = np.bincount(category_by_event, minlength=len(CATEGORIES)).tolist()
        totals_ns = _sum_by_row(category_by_event, trace.duration_ns[activities.event_rows], len(CATEGORIES))
        category_times = [CategoryTime(*entry) for entry in zip(CATEGORIES, counts, totals_ns, strict=True) if entry[1]]
        return sum_categories(category_times), _measure_gpu_operators(trace, activities, call_tree, category_by_event)
    call_tree = _build_tree(trace, activities.launch_row[:0])
    row_keys, row_of_call = _number_rows(trace, call_tree, np.ones(len(call_tree.rows), bool))
    unknown_columns = dict.fromkeys(("kernel_ns", "copy_ns", "with_children_ns"), [None] * len(row_keys))
    columns = _sum_host(trace, call_tree, row_of_call, len(row_keys)) | unknown_columns
    operators = sum_operators(_build_operator(trace, int(key), row, columns, [], None) for row, key in enumerate(row_keys))
    return sum_categories(CategoryTime(row.category, row.calls, row.self_host_ns) for row in operators), operators


def _build_tree(trace: Trace, launch_rows: NDArray[np.intp]) -> _CallTree:
    """Find the calls of operators, level by level. launch_rows: the launching calls as indexes of events; -1: not recorded."""
    call_rows = np.flatnonzero(trace.has_category("cpu_op") & (trace.duration_ns > 0))
    call_rows = call_rows[gloo.find_moments_in_steps(trace, trace.start_ns[call_rows])]
    call_rows = call_rows[np.lexsort((-trace.duration_ns[call_rows], trace.start_ns[call_rows], trace.thread[call_rows]))]
    depth_by_call, self_ns = _compute_call_depths(trace, call_rows), trace.duration_ns[call_rows].copy()
    innermost_call, caller_by_level = np.full(len(launch_rows), -1, np.intp), []
    pending, outer_calls = np.flatnonzero(launch_rows >= 0), np.empty(0, np.intp)
    for level in range(min(int(depth_by_call.max(initial=-1)) + 1, MOST_LEVELS)):
        level_calls = np.flatnonzero(depth_by_call == level)
        parent = _find_calls(trace, call_rows, outer_calls, call_rows[level_calls])
        np.subtract.at(self_ns, parent[parent >= 0], trace.duration_ns[call_rows[level_calls[parent >= 0]]])
        caller_by_launch = np.full(len(launch_rows), -1, np.intp)
        caller_by_launch[pending] = _find_calls(trace, call_rows, level_calls, launch_rows[pending])
        pending = np.flatnonzero(caller_by_launch >= 0)  # what is in no call of this level is in no deeper call
        innermost_call[pending] = caller_by_launch[pending]
        caller_by_level.append(caller_by_launch)
        outer_calls = level_calls
    return _CallTree(call_rows, np.maximum(self_ns, 0), caller_by_level, innermost_call)


def _compute_call_depths(trace: Trace, call_rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each call, the number of calls of its thread that contain its start. call_rows: sorted by thread and start, outer
    calls first."""
    depth = np.zeros(len(call_rows), np.intp)
    thread_edges = np.flatnonzero(np.diff(trace.thread[call_rows], prepend=-1, append=-1)).tolist()
    for first, last_index in pairwise(thread_edges):
        starts_ns, ends_ns = (trace.start_ns[call_rows[first:last_index]], np.sort(trace.end_ns[call_rows[first:last_index]]))
        depth[first:last_index] = np.arange(last_index - first) - np.searchsorted(ends_ns, starts_ns, side="right")
    return depth


def _find_calls(trace: Trace, rows: NDArray[np.intp], calls: NDArray[np.intp], moments: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each of the events `moments`, which of `calls` contains its start; -1 if none does."""
    span_index = find_containing_spans(select_spans(trace, rows[calls]), trace.thread[moments], trace.start_ns[moments])
    return np.where(span_index >= 0, calls[span_index], -1) if len(calls) else span_index


def _classify_events(trace: Trace, activities: Activities, call_tree: _CallTree) -> NDArray[np.intp]:
    """The category of each of `activities.event_rows`, as an index in CATEGORIES."""
    event_rows, labels = activities.event_rows, [*trace.labels, ""]
    call_labels = np.append(trace.name[call_tree.rows], len(trace.labels))  # the last is that of no call, whose index is -1
    kernel_call_pairs, pair_by_event = np.unique(
        trace.name[event_rows].astype(np.int64) * len(labels) + call_labels[call_tree.innermost], return_inverse=True
    )
    kernels_and_calls = (divmod(pair_number, len(labels)) for pair_number in kernel_call_pairs.tolist())
    pair_categories = [CATEGORIES.index(classify_kernel(labels[kernel], labels[call])) for kernel, call in kernels_and_calls]
    category_by_event = np.array(pair_categories, np.intp)[pair_by_event]
    is_attention = np.array([find_operator_backend(label) is not None for label in labels])
    for launching_call in call_tree.launchers:
        category_by_event[is_attention[call_labels[launching_call]]] = CATEGORIES.index("attention")
    category_by_event[~trace.has_category("kernel")[event_rows]] = CATEGORIES.index("copies")
    category_by_event[activities.is_collective] = CATEGORIES.index("communication")
    return category_by_event


def _measure_gpu_operators(
    trace: Trace, activities: Activities, call_tree: _CallTree, category_by_event: NDArray[np.intp]
) -> list[OperatorTime]:
    event_rows, has_operator = activities.event_rows, call_tree.innermost >= 0
    is_launching_call = np.zeros(len(call_tree.rows), bool)
    is_launching_call[call_tree.innermost[has_operator]] = True
    keys, row_of_call = _number_rows(trace, call_tree, is_launching_call)
    row_count = len(keys) + len(CATEGORIES)  # the last rows are of work that was launched outside of operators
    row_of_event = len(keys) + category_by_event
    row_of_event[has_operator] = row_of_call[call_tree.innermost[has_operator]]
    durations_ns, is_kernel = trace.duration_ns[event_rows], trace.has_category("kernel")[event_rows]
    # a call that launched nothing, such as a call that was captured into a CUDA graph, has no time and does not count
    is_counted = is_launching_call | ~np.isin(row_of_call, row_of_call[is_launching_call])
    columns = _sum_host(trace, call_tree, row_of_call, row_count) | {
        "calls": np.bincount(np.append(row_of_call[is_counted], row_of_event[~has_operator]), minlength=row_count).tolist(),
        "kernel_ns": _sum_by_row(row_of_event[is_kernel], durations_ns[is_kernel], row_count),
        "copy_ns": _sum_by_row(row_of_event[~is_kernel], durations_ns[~is_kernel], row_count),
        "with_children_ns": _sum_with_children(call_tree, row_of_call, row_of_event, durations_ns, row_count),
    }
    category_ns = np.full((row_count, len(CATEGORIES)), -1, np.int64)
    # a copy decides the category only of an operator that launched no kernel
    np.add.at(category_ns, (row_of_event, category_by_event), np.where(is_kernel, durations_ns + 1, 1))
    has_own_work = category_ns.max(axis=1) >= 0
    categories = [
        CATEGORIES[index] if has_work else None
        for index, has_work in zip(category_ns.argmax(axis=1), has_own_work, strict=True)
    ]
    kernels = _list_longest_kernels(trace, event_rows[is_kernel], row_of_event[is_kernel])
    return sum_operators(
        _build_operator(trace, int(keys[row]) if row < len(keys) else None, row, columns, kernels.get(row, []), categories[row])
        for row in range(row_count)
        if columns["calls"][row]
    )


def _number_rows(trace: Trace, tree: _CallTree, is_detailed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Returns (a number for operator and inputs of each row, the row of each call). A row has the inputs of its operator only
    if one of its calls is detailed."""
    name_keys = trace.name[tree.rows].astype(np.int64) * len(trace.input_texts)
    pair = name_keys + trace.inputs[tree.rows]
    row_keys, row_of_call = np.unique(np.where(np.isin(pair, pair[is_detailed]), pair, name_keys), return_inverse=True)
    return row_keys, row_of_call


def _sum_host(trace: Trace, tree: _CallTree, row_of_call: NDArray[np.intp], row_count: int) -> dict[str, Any]:
    return {
        "calls": np.bincount(row_of_call, minlength=row_count).tolist(),
        "self_host_ns": _sum_by_row(row_of_call, tree.self_ns, row_count),
        "host_ns": _sum_by_row(row_of_call, trace.duration_ns[tree.rows], row_count),
    }


def _sum_by_row(row_by_value: NDArray[np.intp], summed_values: NDArray[np.int64], row_count: int) -> list[int]:
    sum_by_row = np.zeros(row_count, np.int64)
    np.add.at(sum_by_row, row_by_value, summed_values)
    return sum_by_row.tolist()


def _sum_with_children(
    call_tree: _CallTree,
    row_of_call: NDArray[np.intp],
    row_of_event: NDArray[np.intp],
    durations_ns: NDArray[np.int64],
    row_count: int,
) -> list[int]:
    outer_rows = [np.where(call_tree.innermost < 0, row_of_event, -1)]
    for launching_call in call_tree.launchers:
        row_at_level = np.append(row_of_call, -1)[launching_call]
        is_repeated = np.any([outer_row == row_at_level for outer_row in outer_rows], axis=0)
        outer_rows.append(np.where(is_repeated, -1, row_at_level))  # if an operator calls itself, a kernel counts once
    row_by_value, repeated_ns = np.concatenate(outer_rows), np.tile(durations_ns, len(outer_rows))
    return _sum_by_row(row_by_value[row_by_value >= 0], repeated_ns[row_by_value >= 0], row_count)


def _list_longest_kernels(trace: Trace, kernel_rows: NDArray[np.intp], row_of_kernel: NDArray[np.intp]) -> dict[int, list[str]]:
    """The names of the MOST_KERNELS longest kernels of each row."""
    row_name_pairs, pair_by_kernel = np.unique(row_of_kernel * len(trace.labels) + trace.name[kernel_rows], return_inverse=True)
    ns_by_pair = np.array(_sum_by_row(pair_by_kernel, trace.duration_ns[kernel_rows], len(row_name_pairs)), np.int64)
    kernels_by_row: dict[int, list[str]] = {}
    for pair_number in row_name_pairs[np.argsort(-ns_by_pair, kind="stable")].tolist():
        row, label_index = divmod(pair_number, len(trace.labels))
        if len(kernel_names := kernels_by_row.setdefault(row, [])) < MOST_KERNELS:
            kernel_names.append(trace.labels[label_index])
    return kernels_by_row


def _multiply(work_per_call: int | None, call_count: int) -> int | None:
    return None if work_per_call is None or work_per_call * call_count > _MOST_ROW_WORK else work_per_call * call_count


def _build_operator(
    trace: Trace,
    row_key: int | None,
    row: int,
    column_by_field: Mapping[str, Sequence[Any]],
    kernels: list[str],
    category: WorkCategory | None,
) -> OperatorTime:
    """The row of an operator. row_key: the number of its operator and inputs; None: outside of operators. column_by_field: the
    values of all rows by field. category: that of its own work; None: it launched none."""
    label_index, text_index = (-1, 0) if row_key is None else divmod(row_key, len(trace.input_texts))
    operator, input_texts = "" if row_key is None else trace.labels[label_index], trace.input_texts[text_index]
    category = category or classify_operator(operator)
    flops, moved_bytes = count_work(operator, category, input_texts) if kernels else (None, None)
    value_by_field = {field_name: column[row] for field_name, column in column_by_field.items()}
    input_types = [input_type if isinstance(input_type, str) else "" for input_type in parse_list(input_texts.types)]
    flops, moved_bytes = (_multiply(flops, value_by_field["calls"]), _multiply(moved_bytes, value_by_field["calls"]))
    return OperatorTime(
        operator=operator,
        category=category,
        shapes=json.dumps(parse_list(input_texts.shapes), separators=(",", ":")) if input_texts.shapes else "",
        types=input_types,
        kernels=kernels,
        flops=flops,
        bytes=moved_bytes,
        least_ns=compute_least_ns(flops, moved_bytes, trace.head.gpu, find_precision(input_types, kernels)),
        **value_by_field,
    )
