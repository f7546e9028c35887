"""Finds, in the trace of a rank without a GPU, which events are compute and which are collectives of the library gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import intervals
from collect.traces.collective import GLOO_PREFIX, CollectiveOperation, find_torch_name, is_gloo_name
from collect.traces.intervals import Intervals
from collect.traces.launches import STEP_NAME
from collect.traces.trace import Trace

_C10D_PREFIXES = ("c10d::", "_c10d_functional::", "c10d_functional::")
# an event that includes hooks of autograd, which may wait for a collective
AUTOGRAD_NODE = "autograd::engine::evaluate_function"
_REDUCE_SCATTER_WORD = "reduce_scatter"
_POINT_TO_POINT = ("send", "recv")


class CpuActivity(NamedTuple):
    """What a rank without a GPU does, within start_ns to end_ns. All masks have the shape (number of events,)."""

    start_ns: int
    end_ns: int
    is_operator: NDArray[np.bool_]
    """Which events are operators of the main thread."""
    is_c10d: NDArray[np.bool_]
    """Which of these operators launch collectives or wait for them."""
    is_launch: NDArray[np.bool_]
    """Which of these operators launch collectives."""
    is_computing: NDArray[np.bool_]
    """Which of these operators compute: all but those of c10d and the wrappers of autograd."""
    is_collective: NDArray[np.bool_]
    """Which events are spans of gloo, on any thread."""
    compute: Intervals
    """When an operator other than a wrapper of autograd runs and no operator of c10d runs, within start_ns to end_ns."""
    communication: Intervals
    """When a span of gloo runs, including its waiting for other ranks, within start_ns to end_ns. `gloo:send` and `gloo:recv`
    are spans on the main thread that last until they are waited for."""


def find_activity(trace: Trace) -> CpuActivity | None:
    """Find what a rank without a GPU does, from its trace; None if the trace contains neither operators nor spans of gloo."""
    is_step = find_steps(trace)
    is_operator = trace.has_category("cpu_op")
    is_collective = _match_names(trace, is_gloo_name) & ~is_operator
    if not (is_operator | is_collective).any():
        return None
    main_thread = _find_main_thread(trace, is_step, is_operator)
    is_operator &= trace.thread == main_thread
    is_c10d = is_operator & _match_names(trace, lambda label: label.startswith(_C10D_PREFIXES))
    is_computing = is_operator & ~is_c10d & _match_names(trace, lambda label: not label.startswith(AUTOGRAD_NODE))
    is_in_range = is_step if is_step.any() else is_operator | is_collective
    range_start_ns, range_end_ns = int(trace.start_ns[is_in_range].min()), int(trace.end_ns[is_in_range].max())
    compute = intervals.subtract_intervals(intervals.merge_events(trace, is_computing), intervals.merge_events(trace, is_c10d))
    return CpuActivity(
        start_ns=range_start_ns,
        end_ns=range_end_ns,
        is_operator=is_operator,
        is_c10d=is_c10d,
        is_launch=is_c10d & _match_names(trace, lambda label: label.startswith("c10d::")),
        is_computing=is_computing,
        is_collective=is_collective,
        compute=intervals.clip_intervals(compute, range_start_ns, range_end_ns),
        communication=intervals.clip_intervals(intervals.merge_events(trace, is_collective), range_start_ns, range_end_ns),
    )


def find_steps(trace: Trace) -> NDArray[np.bool_]:
    """Which events are profiler steps."""
    return trace.has_category("user_annotation") & _match_names(trace, lambda label: STEP_NAME.match(label) is not None)


def find_steps_at(trace: Trace, moments_ns: NDArray[np.int64]) -> list[int]:
    """The number of the profiler step (from its name) that contains each moment; -1 if no step contains the moment."""
    step_rows = np.flatnonzero(find_steps(trace))
    step_rows = step_rows[np.argsort(trace.start_ns[step_rows], kind="stable")]
    if not len(step_rows):
        return [-1] * len(moments_ns)
    step_matches = [match for label in trace.name[step_rows] if (match := STEP_NAME.match(trace.labels[label]))]
    step_numbers = np.array([int(step_match[1]) for step_match in step_matches], np.int64)
    step_positions = np.searchsorted(trace.start_ns[step_rows], moments_ns, side="right") - 1
    is_inside = (step_positions >= 0) & (moments_ns < trace.end_ns[step_rows][step_positions])
    return np.where(is_inside, step_numbers[step_positions], -1).tolist()  # type: ignore[no-any-return]


def find_moments_in_steps(trace: Trace, moments_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which moments lie in a profiler step. If the trace has no profiler steps, all moments count. Shape (number of
    moments,)."""
    is_step = find_steps(trace)
    return (
        intervals.find_covered(intervals.merge_events(trace, is_step), moments_ns)
        if is_step.any()
        else np.ones(len(moments_ns), bool)
    )


def find_autograd_nodes(trace: Trace) -> NDArray[np.bool_]:
    """Which events are the wrappers of autograd around the operators of a backward pass."""
    return trace.has_category("cpu_op") & _match_names(trace, lambda label: label.startswith(AUTOGRAD_NODE))


def name_collectives(trace: Trace, activity: CpuActivity) -> list[str]:
    """The name of the collective of each span of gloo, in the order of the spans in the trace.

    gloo carries out a reduce_scatter as an all_reduce of the whole input, and names the span all_reduce. The operator that
    launched the span has the name of the requested collective. gloo starts its work in the order of the launches, so spans and
    launches are paired in this order. If they do not pair one to one with matching names (for example because some launches
    were before the recording), every span keeps the name that gloo gave it.

    activity: the result of `find_activity` for the trace.
    """
    span_rows = np.flatnonzero(activity.is_collective)
    span_names = [trace.labels[label][len(GLOO_PREFIX) :] for label in trace.name[span_rows]]
    queued_indexes = [span_index for span_index, name in enumerate(span_names) if name not in _POINT_TO_POINT]
    queued_indexes.sort(key=lambda span_index: trace.start_ns[span_rows[span_index]])
    launch_rows = sorted(np.flatnonzero(activity.is_launch), key=lambda row: trace.start_ns[row])
    named_launches = [
        (row, find_torch_name(trace.labels[trace.name[row]].removeprefix("c10d::").strip("_"))) for row in launch_rows
    ]
    queued_launches = [(row, name) for row, name in named_launches if name not in _POINT_TO_POINT]
    if len(queued_launches) != len(queued_indexes):
        return span_names
    collective_names = list(span_names)
    for span_index, (row, name) in zip(queued_indexes, queued_launches, strict=True):
        is_match = name == span_names[span_index] or (name, span_names[span_index]) == ("reduce_scatter", "all_reduce")
        if not is_match or trace.start_ns[span_rows[span_index]] < trace.start_ns[row]:
            return span_names
        collective_names[span_index] = name
    return collective_names


def find_span_operations(trace: Trace, activity: CpuActivity, collective_names: Sequence[str]) -> list[CollectiveOperation]:
    """The collective of each span of gloo, in the order of the spans in the trace. collective_names: the result of
    `name_collectives`.

    The number of elements is known if the profiler recorded shapes. gloo gathers the inputs of all ranks of the group, so the
    output of an all_gather is its input times the number of ranks. If a reduce_scatter was launched but its span could not be
    identified, the size of an all_reduce is not given, because the span may be the reduce_scatter, which counts as fewer bytes.
    """
    group_size = find_sole_group_size(trace)
    is_ambiguous = "reduce_scatter" not in collective_names and bool(
        (activity.is_launch & _match_names(trace, lambda label: _REDUCE_SCATTER_WORD in label)).any()
    )
    span_operations = []
    for span_row, name in zip(np.flatnonzero(activity.is_collective), collective_names, strict=True):
        operation = trace.collectives[index] if (index := trace.collective[span_row]) >= 0 else CollectiveOperation(name)
        in_elements = None if name == "all_reduce" and is_ambiguous else operation.in_elements
        out_elements = (
            in_elements * group_size if name == "all_gather" and in_elements is not None and group_size is not None else None
        )
        span_operations.append(operation._replace(name=name, in_elements=in_elements, out_elements=out_elements))
    return span_operations


def find_sole_group_size(trace: Trace) -> int | None:
    """The number of ranks in the process groups of a rank, if all these groups have the same size; otherwise None.

    Also None if the trace does not list the groups.
    """
    group_sizes = {group.pg_size for group in trace.head.groups or ()}
    return group_sizes.pop() if len(group_sizes) == 1 else None


def _find_main_thread(trace: Trace, is_step: NDArray[np.bool_], is_operator: NDArray[np.bool_]) -> int:
    """The number of the thread with the profiler steps. Without profiler steps, the thread with the most operators; -1
    without both."""
    is_deciding = is_step if is_step.any() else is_operator
    return int(np.bincount(trace.thread[is_deciding]).argmax()) if is_deciding.any() else -1


def _match_names(trace: Trace, is_wanted_name: Callable[[str], bool]) -> NDArray[np.bool_]:
    return trace.match_labels(trace.name, [is_wanted_name(label) for label in trace.labels])
