"""Computes the time of each module of the model: forward, backward and communication, in all profiled steps together.

torch.profiler records the calls of modules if it records stacks (`with_stack=True`), as frames `nn.Module: Linear_0`. The
number counts the modules of this class in the order of their first call. torch 2 records no calls of modules with
`with_modules=True` alone.

- forward: what runs or is launched during a call of the module. A call that starts during a node of autograd computes
  activations again (activation checkpointing), and belongs to backward.
- backward: what runs or is launched during the nodes of autograd that belong to the operators of these calls. A node and its
  operator have the same number (`Sequence number`), which autograd counts for each thread of forward. If several operators
  have this number, the last of them made the node (Kineto draws its arrows from forward to backward by the same numbers).

The time of a module contains the time of the modules that it calls.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo
from collect.traces.activities import Activities
from collect.traces.details import EventSpans
from collect.traces.event_decoder import MODULE
from collect.traces.nesting import MOST_LEVELS, Nesting, compute_nesting, find_containing_spans, union_lengths
from collect.traces.rank_sums import merge_rows
from collect.traces.trace import Trace


class LayerTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a module on one rank, all profiled steps together, in ns."""

    name: str
    """The module's name in the trace, such as Linear_0."""
    parent: str
    """The module that calls it first; "" if no module calls it."""
    depth: int
    """The number of modules that contain the module."""
    calls: int
    """The number of calls in forward."""
    forward_host_ns: int
    """The time of the host in forward. On a CPU, this time contains all work."""
    backward_host_ns: int | None
    """The time of the host in backward. On a CPU, this time contains all work."""
    forward_ns: int | None
    """The time in which kernels that compute and memory operations run that the module launched in forward."""
    backward_ns: int | None
    """The same time for backward."""
    communication_ns: int | None
    """The time in which collectives run that the module launched, forward and backward together. None on a CPU.
    backward_host_ns and backward_ns are None if the trace has no numbers of autograd."""

    @property
    def forward(self) -> int:
        """The time of the forward pass in ns: on the GPU, or on the host if there is no GPU."""
        return self.forward_host_ns if self.forward_ns is None else self.forward_ns

    @property
    def backward(self) -> int | None:
        """The time of the backward pass in ns: on the GPU, or on the host if there is no GPU. None: not known."""
        return self.backward_host_ns if self.forward_ns is None else self.backward_ns


def sum_layers(layers: Iterable[LayerTime]) -> list[LayerTime]:
    """The time of each module, summed over all ranks, in the order of the modules' first calls.

    A time is None if it is not known for any one of the ranks.
    """
    times = ("calls", "forward_host_ns", "backward_host_ns", "forward_ns", "backward_ns", "communication_ns")
    return merge_rows(layers, lambda entry: entry.name, times)


def compute_layer_times(trace: Trace, activities: Activities) -> list[LayerTime]:
    """The times of the modules in the order of their first calls; empty if the trace has no calls of modules."""
    calls = trace.details.modules
    order = np.lexsort((-calls.end_ns, calls.start_ns))
    order = order[gloo.starts_in_steps(trace, calls.start_ns)[order]]
    if not len(order):
        return []
    calls = calls.select(order)
    nested = compute_nesting(calls)
    names, first, module = np.unique(calls.name, return_index=True, return_inverse=True)
    chains = _find_module_chains(nested.parent, module)
    is_recomputed = _starts_in_autograd(trace, calls)
    nodes, call_of_node = _find_nodes(trace, calls, nested)
    has_sequences = len(trace.details.sequence) > 0
    # (modules, spans): one entry for each span and each module that contains the span. The spans of `forward` are calls in the
    # forward pass, those of `backward` calls that compute activations again, those of `node_rows` nodes of autograd.
    forward = _pair_with_modules(chains, np.flatnonzero(~is_recomputed), np.flatnonzero(~is_recomputed))
    backward = _pair_with_modules(chains, np.flatnonzero(is_recomputed), np.flatnonzero(is_recomputed))
    node_rows = _pair_with_modules(chains, call_of_node, np.arange(len(call_of_node)))
    host_forward = union_lengths(forward[0], calls.start_ns[forward[1]], calls.end_ns[forward[1]], len(names))
    host_backward = union_lengths(
        np.concatenate([backward[0], node_rows[0]]),
        np.concatenate([calls.start_ns[backward[1]], nodes.start_ns[node_rows[1]]]),
        np.concatenate([calls.end_ns[backward[1]], nodes.end_ns[node_rows[1]]]),
        len(names),
    )
    device = (
        _compute_device_times(trace, activities, nested, chains, is_recomputed, nodes, call_of_node, len(names))
        if activities.source == "gpu"
        else None
    )
    counts = np.bincount(module[~is_recomputed], minlength=len(names))
    parents = nested.parent[first]
    label = [trace.labels[name].removeprefix(MODULE) for name in names]
    depth = [sum(1 for member in chains[call] if member >= 0) - 1 for call in first]
    return [
        LayerTime(
            name=label[index],
            parent=label[module[parents[index]]] if parents[index] >= 0 else "",
            depth=max(0, depth[index]),
            calls=int(counts[index]),
            forward_host_ns=int(host_forward[index]),
            backward_host_ns=int(host_backward[index]) if has_sequences else None,
            forward_ns=None if device is None else int(device[0][index]),
            backward_ns=int(device[1][index]) if device is not None and has_sequences else None,
            communication_ns=None if device is None else int(device[2][index]),
        )
        for index in np.argsort(first, kind="stable").tolist()
    ]


def _find_module_chains(parent: NDArray[np.intp], module: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each call of a module, the called module and all modules around it, the innermost first. Each module occurs once.

    Shape (number of calls, greatest number of modules of a call). Shorter rows are filled up with -1.
    """
    rows: list[list[int]] = []
    module_of_call = module.tolist()
    for call, caller in enumerate(parent.tolist()):  # a parent comes before its children, because calls are sorted by start
        if caller == -2:
            rows.append([])
        else:
            rows.append(list(dict.fromkeys([module_of_call[call], *(rows[caller] if caller >= 0 else [])])))
    width = min(MOST_LEVELS, max(map(len, rows)))
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], np.intp).reshape(len(rows), width)


def _pair_with_modules(
    chains: NDArray[np.intp], calls: NDArray[np.intp], rows: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pair each row with all modules of the call to which the row belongs. Returns (module of each pair, row of each pair).

    chains: the modules of each call, from `_find_module_chains`. calls: for each of `rows`, the index of its call.
    """
    modules = chains[calls]
    is_module = modules >= 0
    return modules[is_module], np.broadcast_to(rows[:, None], modules.shape)[is_module]


def _starts_in_autograd(trace: Trace, calls: EventSpans) -> NDArray[np.bool_]:
    """Which calls of modules start during a node of autograd on the same thread."""
    rows = gloo.find_autograd(trace)
    wrappers = EventSpans(trace.name[rows], trace.thread[rows], trace.start_ns[rows], trace.end_ns[rows])
    return find_containing_spans(compute_nesting(wrappers).segments, calls.thread, calls.start_ns) >= 0


def _find_nodes(trace: Trace, calls: EventSpans, nested: Nesting) -> tuple[EventSpans, NDArray[np.intp]]:
    """Find the nodes of autograd whose operators run inside calls of modules.

    Returns (these nodes, for each node the index of the innermost call in which its operator runs).
    """
    details = trace.details
    operators, sequence, thread = details.operators, details.sequence, details.forward_thread
    wrapper = trace.match_labels(operators.name, [label.startswith(gloo.WRAPPER) for label in trace.labels])
    node, forward = np.flatnonzero(wrapper & (thread > 0)), np.flatnonzero(thread == 0)
    maker = _find_makers(operators, sequence, node, forward, thread)
    node = node[maker >= 0]
    maker = maker[maker >= 0]
    segment = find_containing_spans(nested.segments, operators.thread[maker], operators.start_ns[maker])
    node, call = node[segment >= 0], nested.segments.name[segment[segment >= 0]]
    spans = operators.select(node)
    is_in_steps = gloo.starts_in_steps(trace, spans.start_ns)
    return spans.select(is_in_steps), call[is_in_steps].astype(np.intp)


def _find_makers(
    operators: EventSpans,
    sequence: NDArray[np.int64],
    node: NDArray[np.intp],
    forward: NDArray[np.intp],
    thread: NDArray[np.int64],
) -> NDArray[np.intp]:
    """For each node of autograd, the index of the operator of the forward pass that made the node; -1 if the operator is not
    known.

    The operator is the last one before the node, on the thread of the forward pass, that has the sequence number of the node.
    Kineto numbers the thread of the forward pass differently from other threads. So the thread whose operators match most of
    the nodes is used.
    """
    makers = np.full(len(node), -1, np.intp)
    order = forward[np.lexsort((operators.start_ns[forward], sequence[forward], operators.thread[forward]))]
    for number in np.unique(thread[node]):
        thread_nodes = np.flatnonzero(thread[node] == number)
        most_matches = np.full(len(thread_nodes), -1, np.intp)
        for candidate in np.unique(operators.thread[order]):
            rows = order[operators.thread[order] == candidate]
            matches = _find_last_before(operators, sequence, rows, node[thread_nodes])
            if np.count_nonzero(matches >= 0) > np.count_nonzero(most_matches >= 0):
                most_matches = matches
        makers[thread_nodes] = most_matches
    return makers


def _find_last_before(
    operators: EventSpans, sequence: NDArray[np.int64], rows: NDArray[np.intp], node: NDArray[np.intp]
) -> NDArray[np.intp]:
    """For each node, the index of the last operator before the node that has the sequence number of the node; -1 if there is
    none.

    rows: the indexes of the operators, sorted by sequence number, then by start.
    """
    moments = np.concatenate([operators.start_ns[rows], operators.start_ns[node]])
    numbers = np.concatenate([sequence[rows], sequence[node]])
    is_node = np.arange(len(moments)) >= len(rows)
    order = np.lexsort((is_node, moments, numbers))
    last = np.maximum.accumulate(np.where(is_node[order], -1, np.arange(len(order))))
    candidate = order[np.maximum(last, 0)]
    is_match = (last >= 0) & (numbers[candidate] == numbers[order]) & is_node[order]
    last_operator = np.full(len(moments), -1, np.intp)
    last_operator[order[is_match]] = rows[candidate[is_match]]
    return last_operator[len(rows) :]


def _compute_device_times(
    trace: Trace,
    activities: Activities,
    nested: Nesting,
    chains: NDArray[np.intp],
    is_recomputed: NDArray[np.bool_],
    nodes: EventSpans,
    call_of_node: NDArray[np.intp],
    count: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns (time of forward, time of backward, time of collectives) on the GPU, each as an array with one value per
    module, in ns."""
    with_launch = np.flatnonzero(activities.launch_row >= 0)
    launch = activities.launch_row[with_launch]
    thread, moment = trace.thread[launch], trace.start_ns[launch]
    segment = find_containing_spans(nested.segments, thread, moment)
    call = np.where(segment >= 0, nested.segments.name[segment], -1) if len(nested.segments.name) else segment
    segments = compute_nesting(nodes).segments
    node_segment = find_containing_spans(segments, thread, moment)
    node = np.where(node_segment >= 0, segments.name[node_segment], -1) if len(segments.name) else node_segment
    by_call, by_node = np.flatnonzero(call >= 0), np.flatnonzero(node >= 0)
    module, row = _pair_with_modules(chains, call[by_call], by_call)
    module_of_node, row_of_node = _pair_with_modules(chains, call_of_node[node[by_node]], by_node)
    is_backward = np.concatenate([is_recomputed[call[row]], np.ones(len(row_of_node), bool)])
    module, row = np.concatenate([module, module_of_node]), np.concatenate([row, row_of_node])
    rows = activities.rows[with_launch][row]
    collective = activities.is_collective[with_launch][row]

    def time(chosen_rows: NDArray[np.bool_]) -> NDArray[np.int64]:
        return union_lengths(module[chosen_rows], trace.start_ns[rows[chosen_rows]], trace.end_ns[rows[chosen_rows]], count)

    return time(~collective & ~is_backward), time(~collective & is_backward), time(collective)
