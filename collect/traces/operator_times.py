"""Divides the time of a GPU by category of work and by operator: own work, and work of all that an operator calls.

A kernel belongs to the operator that runs on the launching thread when the kernel is launched (its own kernel), and to all
operators around this operator. Times are sums of durations: kernels that run at the same time count twice. On a CPU, the own
time of an operator is the time in which it runs and no operator that it calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo
from collect.traces.activities import Activities
from collect.traces.attention import find_operator_backend
from collect.traces.input_shapes import parse_list
from collect.traces.kernel_categories import CATEGORIES, Category, classify_kernel, classify_operator
from collect.traces.nesting import MOST_LEVELS, find_containing_spans, select_spans
from collect.traces.operator_work import Work, compute_least_ns, count_work, find_precision
from collect.traces.rank_sums import merge_rows
from collect.traces.trace import InputTexts, Trace
from shardlab.hardware.gpu_models import find_gpu_model

MOST_KERNELS = 4  # the most kernel names in an OperatorTime
_COPIES, _COMMUNICATION = CATEGORIES.index("copies"), CATEGORIES.index("communication")
_ATTENTION = CATEGORIES.index("attention")


class CategoryTime(msgspec.Struct, frozen=True):
    """The work of one category on one rank, in all profiled steps together."""

    category: Category
    count: int
    """The number of kernels and memory operations; on a CPU, of operators."""
    total_ns: int
    """The sum of their durations; on a CPU, of the own times of the operators."""


class OperatorTime(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of an operator with the same inputs on one rank, in all profiled steps together. Times are in ns.

    Operators that launch nothing themselves are one row for each name.
    """

    operator: str
    """Its name, such as aten::add; "": kernels that were launched outside of operators, one row for each category."""
    category: Category
    """The category of the longest of its own kernels."""
    shapes: str
    """The shapes of its inputs as JSON; "" if the trace does not record them."""
    types: list[str]
    """The types of its inputs."""
    calls: int
    kernels: list[str]
    """The names of at most MOST_KERNELS of its own kernels, the kernel with the longest time first."""
    launched: int
    """The number of its own kernels and memory operations."""
    own_ns: int | None
    """The time of its own kernels. None on a CPU."""
    copy_ns: int | None
    """The time of its own copies and memory sets. None on a CPU."""
    with_children_ns: int | None
    """The time of all kernels and memory operations that were launched during its calls. None on a CPU."""
    shortest_ns: int | None
    """The shortest of its own kernels; None without any."""
    longest_ns: int | None
    """The longest of its own kernels."""
    self_host_ns: int
    """The time of the host in the operator, without the operators that it calls."""
    host_ns: int
    """The time of the host in the operator."""
    flops: int | None
    """The FLOPs of all calls by formula; None: no formula (collect/traces/operator_work.py)."""
    bytes: int | None
    """The bytes that all calls must at least read and write."""

    @property
    def time_ns(self) -> int:
        """The own time: of its kernels and memory operations, or on a CPU of the host."""
        return self.self_host_ns if self.own_ns is None or self.copy_ns is None else self.own_ns + self.copy_ns

    @property
    def inclusive_ns(self) -> int:
        """The time with all operators that it calls: of the GPU, or on a CPU of the host."""
        return self.host_ns if self.with_children_ns is None else self.with_children_ns

    @property
    def flops_per_s(self) -> float | None:
        """The achieved FLOP/s."""
        return self.flops / self.own_ns * 1e9 if self.flops is not None and self.own_ns else None

    @property
    def bytes_per_s(self) -> float | None:
        """The bytes that must be moved, divided by the time of the own kernels."""
        return self.bytes / self.own_ns * 1e9 if self.bytes is not None and self.own_ns else None

    @property
    def precision(self) -> str:
        """The precision in which it computes; "" if it is not known."""
        return find_precision(self.types, self.kernels)

    def least_ns(self, gpu: str, precision: str = "") -> float | None:
        """The least time for the work on a GPU of this model by its data sheet; None: not known.

        precision: the precision of the work, if it is not that of the operator.
        """
        gpu_model = find_gpu_model(gpu) if gpu and self.own_ns else None
        if gpu_model is None:
            return None
        return compute_least_ns(Work(self.flops, self.bytes), gpu_model, precision or self.precision)

    def roofline_pct(self, gpu: str) -> float | None:
        """The least time as a share of the time of the own kernels, in percent; None: not known."""
        least_ns = self.least_ns(gpu)
        return 100 * least_ns / self.own_ns if least_ns is not None and self.own_ns else None


class _CallTree(NamedTuple):
    """The operators of the profiled steps, and what runs or is launched in them. Calls are indexes in `rows`."""

    rows: NDArray[np.intp]
    """The calls of operators as indexes of events in the trace."""
    self_ns: NDArray[np.int64]
    """For each call, its duration without the calls in it."""
    launchers: list[NDArray[np.intp]]
    """For each level, from the outermost: for each launch, the call that contains it; -1 if none does."""
    innermost: NDArray[np.intp]
    """For each launch, the innermost call that contains it; -1 if none does."""


def sum_operators(operators: Iterable[OperatorTime]) -> list[OperatorTime]:
    """The operators of all ranks, added up by name and inputs, the longest own time first."""
    rows = list(operators)
    summed = merge_rows(
        rows,
        _sum_key,
        ("calls", "launched", "own_ns", "copy_ns", "with_children_ns", "self_host_ns", "host_ns", "flops", "bytes"),
    )
    extremes: dict[object, tuple[int, int]] = {}
    for row in rows:
        if row.shortest_ns is not None and row.longest_ns is not None:
            shortest_ns, longest_ns = extremes.get(_sum_key(row), (row.shortest_ns, row.longest_ns))
            extremes[_sum_key(row)] = min(shortest_ns, row.shortest_ns), max(longest_ns, row.longest_ns)
    summed = [
        msgspec.structs.replace(row, shortest_ns=extremes[_sum_key(row)][0], longest_ns=extremes[_sum_key(row)][1])
        if _sum_key(row) in extremes
        else row
        for row in summed
    ]
    return sorted(summed, key=lambda row: (-row.time_ns, -(row.with_children_ns or 0), -row.host_ns, row.operator, row.shapes))


def _sum_key(row: OperatorTime) -> tuple[str, str, str, str]:
    return row.operator, row.shapes, " ".join(row.types), row.category if not row.operator else ""


def sum_categories(times: Iterable[CategoryTime]) -> list[CategoryTime]:
    """The categories of all ranks, the longest time first."""
    return sorted(merge_rows(times, lambda time: time.category, ("count", "total_ns")), key=lambda time: -time.total_ns)


def operator_document(row: OperatorTime, gpu: str) -> dict[str, Any]:
    """An operator as JSON values. gpu: the model of the GPU; "" if it is not known."""
    rates = {"flops_per_s": row.flops_per_s, "bytes_per_s": row.bytes_per_s, "roofline_pct": row.roofline_pct(gpu)}
    return msgspec.to_builtins(row) | rates  # type: ignore[no-any-return]


def measure_operators(trace: Trace, activities: Activities) -> tuple[list[CategoryTime], list[OperatorTime]]:
    """The time of a rank by category and by operator, the longest first."""
    is_gpu = activities.source == "gpu"
    event_rows = activities.event_rows if is_gpu else activities.event_rows[:0]
    launch_rows = activities.launch_row if is_gpu else activities.launch_row[:0]
    tree = _build_tree(trace, launch_rows)
    if not is_gpu:
        return _measure_cpu_operators(trace, tree)
    durations_ns = trace.duration_ns[event_rows]
    category = _classify_events(trace, activities, tree)
    counts = np.bincount(category, minlength=len(CATEGORIES))
    totals_ns = np.zeros(len(CATEGORIES), np.int64)
    np.add.at(totals_ns, category, durations_ns)
    categories = [
        CategoryTime(CATEGORIES[index], int(counts[index]), int(totals_ns[index])) for index in np.flatnonzero(counts).tolist()
    ]
    return sum_categories(categories), _measure_gpu_operators(trace, activities, tree, category)


def _build_tree(trace: Trace, launch_rows: NDArray[np.intp]) -> _CallTree:
    """Find the calls of operators, level by level. launch_rows: the launching calls as indexes of events; -1: not recorded."""
    rows = np.flatnonzero(trace.has_category("cpu_op") & (trace.duration_ns > 0))
    rows = rows[gloo.starts_in_steps(trace, trace.start_ns[rows])]
    rows = rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows], trace.thread[rows]))]
    depth = _find_depths(trace, rows)
    self_ns = trace.duration_ns[rows].copy()
    innermost = np.full(len(launch_rows), -1, np.intp)
    launchers: list[NDArray[np.intp]] = []
    pending, outer_calls = np.flatnonzero(launch_rows >= 0), np.empty(0, np.intp)
    for level in range(min(int(depth.max(initial=-1)) + 1, MOST_LEVELS)):
        calls = np.flatnonzero(depth == level)
        if level:
            parent = _find_calls(trace, rows, outer_calls, rows[calls])
            np.subtract.at(self_ns, parent[parent >= 0], trace.duration_ns[rows[calls[parent >= 0]]])
        launching_call = np.full(len(launch_rows), -1, np.intp)
        launching_call[pending] = _find_calls(trace, rows, calls, launch_rows[pending])
        pending = np.flatnonzero(launching_call >= 0)  # what is in no call of this level is in no deeper call
        innermost[pending] = launching_call[pending]
        launchers.append(launching_call)
        outer_calls = calls
    return _CallTree(rows, np.maximum(self_ns, 0), launchers, innermost)


def _find_depths(trace: Trace, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each call, the number of calls of its thread that contain its start. rows: sorted by thread and start, outer calls
    first."""
    depth = np.zeros(len(rows), np.intp)
    edges = np.flatnonzero(np.diff(trace.thread[rows], prepend=-1, append=-1))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        thread_rows = rows[first:last]
        ended = np.searchsorted(np.sort(trace.end_ns[thread_rows]), trace.start_ns[thread_rows], side="right")
        depth[first:last] = np.arange(last - first) - ended
    return depth


def _find_calls(trace: Trace, rows: NDArray[np.intp], calls: NDArray[np.intp], moments: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each of the events `moments`, which of `calls` contains its start; -1 if none does."""
    span_index = find_containing_spans(select_spans(trace, rows[calls]), trace.thread[moments], trace.start_ns[moments])
    return np.where(span_index >= 0, calls[span_index], -1) if len(calls) else span_index


def _classify_events(trace: Trace, activities: Activities, tree: _CallTree) -> NDArray[np.intp]:
    """The category of each of `activities.event_rows`, as an index in CATEGORIES."""
    event_rows, innermost = activities.event_rows, tree.innermost
    call_labels = trace.name[tree.rows]
    label_count = len(trace.labels)
    operator_labels = np.where(innermost >= 0, call_labels[innermost], label_count) if len(call_labels) else label_count
    pairs, pair_index = np.unique(
        trace.name[event_rows].astype(np.int64) * (label_count + 1) + operator_labels, return_inverse=True
    )
    labels = [*trace.labels, ""]
    pair_category = [
        CATEGORIES.index(classify_kernel(labels[pair // (label_count + 1)], labels[pair % (label_count + 1)]))
        for pair in pairs.tolist()
    ]
    category = np.array(pair_category, np.intp)[pair_index]
    is_attention = np.array([find_operator_backend(label) is not None for label in trace.labels], bool)
    for launching_call in tree.launchers:
        inside = np.flatnonzero(launching_call >= 0)
        category[inside[is_attention[call_labels[launching_call[inside]]]]] = _ATTENTION
    category[~trace.has_category("kernel")[event_rows]] = _COPIES
    category[activities.is_collective] = _COMMUNICATION
    return category


class _RowTimes(NamedTuple):
    """What belongs to each row of operators, one value per row. Times are in ns."""

    calls: list[int]
    self_host_ns: list[int]
    host_ns: list[int]
    own_ns: list[int]
    copy_ns: list[int]
    with_children_ns: list[int]
    shortest_ns: list[int]
    longest_ns: list[int]
    launched: list[int]
    category: list[int]
    """The category of the longest of its own work, as an index in CATEGORIES."""


def _measure_gpu_operators(
    trace: Trace, activities: Activities, tree: _CallTree, category: NDArray[np.intp]
) -> list[OperatorTime]:
    event_rows, innermost = activities.event_rows, tree.innermost
    launches_itself = np.zeros(len(tree.rows), bool)
    launches_itself[innermost[innermost >= 0]] = True
    keys, row_of_call = _number_rows(trace, tree, launches_itself)
    # the rows after those of operators are of work that was launched outside of operators: one row for each category
    row_of_event = len(keys) + category
    row_of_event[innermost >= 0] = row_of_call[innermost[innermost >= 0]]
    is_kernel = trace.has_category("kernel")[event_rows]
    row_count = len(keys) + len(CATEGORIES)
    # a call that launched nothing, such as a call that was captured into a CUDA graph, has no time
    is_counted = launches_itself | ~np.isin(row_of_call, row_of_call[launches_itself])
    times = _sum_rows(trace, event_rows, row_of_event, category, is_kernel, row_count)._replace(
        calls=np.bincount(row_of_call[is_counted], minlength=row_count).tolist(),
        self_host_ns=_sum_by_row(row_of_call, tree.self_ns, row_count),
        host_ns=_sum_by_row(row_of_call, trace.duration_ns[tree.rows], row_count),
        with_children_ns=_sum_with_children(trace, event_rows, tree, row_of_call, row_of_event, row_count),
    )
    kernels = _list_longest_kernels(trace, event_rows[is_kernel], row_of_event[is_kernel])
    rows = range(row_count)
    return sum_operators(
        _build_operator(trace, keys, row, times, kernels.get(row, []))
        for row in rows
        if times.calls[row] or times.launched[row]
    )


def _number_rows(trace: Trace, tree: _CallTree, is_detailed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Returns (a number for operator and inputs of each row, the row of each call). A row has the inputs of its operator only
    if one of its calls is detailed."""
    name = trace.name[tree.rows].astype(np.int64) * len(trace.input_texts)
    pair = name + trace.inputs[tree.rows]
    keys, row_of_call = np.unique(np.where(np.isin(pair, pair[is_detailed]), pair, name), return_inverse=True)
    return keys, row_of_call


def _sum_by_row(rows: NDArray[np.intp], values: NDArray[np.int64], row_count: int) -> list[int]:
    sums = np.zeros(row_count, np.int64)
    np.add.at(sums, rows, values)
    return sums.tolist()  # type: ignore[no-any-return]


def _sum_rows(
    trace: Trace,
    event_rows: NDArray[np.intp],
    row_of_event: NDArray[np.intp],
    category: NDArray[np.intp],
    is_kernel: NDArray[np.bool_],
    row_count: int,
) -> _RowTimes:
    durations_ns = trace.duration_ns[event_rows]
    shortest_ns, longest_ns = np.full(row_count, np.iinfo(np.int64).max), np.zeros(row_count, np.int64)
    np.minimum.at(shortest_ns, row_of_event[is_kernel], durations_ns[is_kernel])
    np.maximum.at(longest_ns, row_of_event[is_kernel], durations_ns[is_kernel])
    category_ns = np.full((row_count, len(CATEGORIES)), -1, np.int64)
    # a copy decides the category only of an operator that launched no kernel
    np.add.at(category_ns, (row_of_event, category), np.where(is_kernel, durations_ns + 1, 1))
    return _RowTimes(
        calls=[],
        self_host_ns=[],
        host_ns=[],
        own_ns=_sum_by_row(row_of_event[is_kernel], durations_ns[is_kernel], row_count),
        copy_ns=_sum_by_row(row_of_event[~is_kernel], durations_ns[~is_kernel], row_count),
        with_children_ns=[],
        shortest_ns=shortest_ns.tolist(),
        longest_ns=longest_ns.tolist(),
        launched=np.bincount(row_of_event, minlength=row_count).tolist(),
        category=category_ns.argmax(axis=1).tolist(),
    )


def _sum_with_children(
    trace: Trace,
    event_rows: NDArray[np.intp],
    tree: _CallTree,
    row_of_call: NDArray[np.intp],
    row_of_event: NDArray[np.intp],
    row_count: int,
) -> list[int]:
    outside = tree.innermost < 0
    rows, durations_ns = [row_of_event[outside]], [trace.duration_ns[event_rows[outside]]]
    outer_rows: list[NDArray[np.intp]] = []
    for launching_call in tree.launchers:
        row_at_level = np.where(launching_call >= 0, row_of_call[launching_call], -1)
        is_new = launching_call >= 0
        for outer_row in outer_rows:  # if an operator calls itself, a kernel counts once
            is_new &= outer_row != row_at_level
        rows.append(row_at_level[is_new])
        durations_ns.append(trace.duration_ns[event_rows[is_new]])
        outer_rows.append(row_at_level)
    return _sum_by_row(np.concatenate(rows), np.concatenate(durations_ns), row_count)


def _list_longest_kernels(trace: Trace, kernel_rows: NDArray[np.intp], row_of_kernel: NDArray[np.intp]) -> dict[int, list[str]]:
    """The names of the MOST_KERNELS longest kernels of each row."""
    pairs, pair_index = np.unique(row_of_kernel * len(trace.labels) + trace.name[kernel_rows], return_inverse=True)
    pair_ns = np.array(_sum_by_row(pair_index, trace.duration_ns[kernel_rows], len(pairs)), np.int64)
    kernels: dict[int, list[str]] = {}
    for pair in pairs[np.argsort(-pair_ns, kind="stable")].tolist():
        row, label_index = divmod(pair, len(trace.labels))
        if len(names := kernels.setdefault(row, [])) < MOST_KERNELS:
            names.append(trace.labels[label_index])
    return kernels


def _build_operator(trace: Trace, keys: NDArray[np.int64], row: int, times: _RowTimes, kernels: list[str]) -> OperatorTime:
    """The row of an operator. row: its index in `keys`; beyond their end, a category of work outside of operators."""
    label_index, text_index = divmod(int(keys[row]), len(trace.input_texts)) if row < len(keys) else (-1, 0)
    operator, texts = "" if label_index < 0 else trace.labels[label_index], trace.input_texts[text_index]
    category = CATEGORIES[times.category[row]] if times.launched[row] else classify_operator(operator)
    calls = times.calls[row] or times.launched[row]
    work = count_work(operator, category, texts) if kernels else Work(None, None)
    return OperatorTime(
        operator=operator,
        category=category,
        shapes=_format_shapes(texts),
        types=_read_types(texts),
        calls=calls,
        kernels=kernels,
        launched=times.launched[row],
        own_ns=times.own_ns[row],
        copy_ns=times.copy_ns[row],
        with_children_ns=times.with_children_ns[row],
        shortest_ns=times.shortest_ns[row] if kernels else None,
        longest_ns=times.longest_ns[row] if kernels else None,
        self_host_ns=times.self_host_ns[row],
        host_ns=times.host_ns[row],
        flops=None if work.flops is None else work.flops * calls,
        bytes=None if work.bytes is None else work.bytes * calls,
    )


def _measure_cpu_operators(trace: Trace, tree: _CallTree) -> tuple[list[CategoryTime], list[OperatorTime]]:
    keys, row_of_call = _number_rows(trace, tree, np.ones(len(tree.rows), bool))
    self_ns, host_ns = (_sum_by_row(row_of_call, ns, len(keys)) for ns in (tree.self_ns, trace.duration_ns[tree.rows]))
    operators = []
    for key, calls, row_self_ns, row_ns in zip(keys.tolist(), np.bincount(row_of_call).tolist(), self_ns, host_ns, strict=True):
        label_index, text_index = divmod(key, len(trace.input_texts))
        operator, texts = trace.labels[label_index], trace.input_texts[text_index]
        row = OperatorTime(
            operator=operator, category=classify_operator(operator), shapes=_format_shapes(texts),
            types=_read_types(texts), calls=calls, kernels=[], launched=0, own_ns=None, copy_ns=None, with_children_ns=None,
            shortest_ns=None, longest_ns=None, self_host_ns=row_self_ns, host_ns=row_ns, flops=None, bytes=None,
        )  # fmt: skip
        operators.append(row)
    return sum_categories(CategoryTime(row.category, row.calls, row.self_host_ns) for row in operators), sum_operators(
        operators
    )


def _format_shapes(texts: InputTexts) -> str:
    return msgspec.json.encode(parse_list(texts.shapes)).decode() if texts.shapes else ""


def _read_types(texts: InputTexts) -> list[str]:
    return [entry if isinstance(entry, str) else "" for entry in parse_list(texts.types)]
