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

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo
from collect.traces.activities import Activities
from collect.traces.answer_columns import MOST_LAYERS
from collect.traces.details import EventSpans
from collect.traces.event_decoder import MODULE_PREFIX
from collect.traces.nesting import MOST_LEVELS, Nesting, compute_nesting, find_containing_spans, select_spans, union_lengths
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
    """The time of each module, summed over all ranks: a tree by time, see `_arrange_tree`.

    A time is None if it is not known for any one of the ranks.
    """
    summed_fields = ("calls", "forward_host_ns", "backward_host_ns", "forward_ns", "backward_ns", "communication_ns")
    return _arrange_tree(merge_rows(layers, lambda layer: layer.name, summed_fields))


def count_shown(layers: Sequence[Any]) -> int:
    """How many of the modules from `sum_layers` a table shows: MOST_LAYERS, or all that no other module calls."""
    return max(MOST_LAYERS, sum(not layer.parent for layer in layers))


def _arrange_tree(layers: Sequence[LayerTime]) -> list[LayerTime]:
    """The modules as a tree: each before the modules that it calls, those of one caller by time, the longest first.

    The modules that a table shows come first: all that no other module calls, and the longest others with all their callers.
    """
    layer_of_name = {layer.name: layer for layer in layers}
    longest_first = sorted(layers, key=lambda layer: -(layer.forward + (layer.backward or 0)))
    children: dict[str, list[LayerTime]] = {}
    for layer in longest_first:
        children.setdefault(layer.parent if layer.parent in layer_of_name else "", []).append(layer)
    tree: list[LayerTime] = []
    stack = children.pop("", [])[::-1]
    while stack:
        tree.append(stack.pop())
        stack += children.pop(tree[-1].name, [])[::-1]
    shown_names = {layer.name for layer in layers if layer.parent not in layer_of_name}
    most_shown = max(MOST_LAYERS, len(shown_names))
    for layer in longest_first:
        chain = [layer]
        while chain[-1].parent in layer_of_name and chain[-1].name not in shown_names:
            chain.append(layer_of_name[chain[-1].parent])
        new_names = {entry.name for entry in chain} - shown_names
        if len(shown_names) + len(new_names) <= most_shown:
            shown_names |= new_names
    return sorted(tree, key=lambda layer: layer.name not in shown_names)


def compute_layer_times(trace: Trace, activities: Activities) -> list[LayerTime]:
    """The times of the modules in the order of their first calls; empty if the trace has no calls of modules."""
    module_calls = trace.details.modules
    call_order = np.lexsort((-module_calls.end_ns, module_calls.start_ns))
    call_order = call_order[gloo.starts_in_steps(trace, module_calls.start_ns)[call_order]]
    if not len(call_order):
        return []
    module_calls = module_calls.select(call_order)
    nesting = compute_nesting(module_calls)
    module_labels, first_calls, module_of_call = np.unique(module_calls.name, return_index=True, return_inverse=True)
    module_chains = _find_module_chains(nesting.parent, module_of_call)
    is_recomputed = _starts_in_autograd(trace, module_calls)
    nodes, call_of_node = _find_nodes(trace, module_calls, nesting)
    has_sequences = len(trace.details.sequence_number) > 0
    # (modules, spans): one entry for each span and each module that contains the span. The spans of `forward` are calls in the
    # forward pass, those of `backward` calls that compute activations again, those of `node_rows` nodes of autograd.
    forward_pairs = _pair_with_modules(module_chains, np.flatnonzero(~is_recomputed), np.flatnonzero(~is_recomputed))
    backward_pairs = _pair_with_modules(module_chains, np.flatnonzero(is_recomputed), np.flatnonzero(is_recomputed))
    node_pairs = _pair_with_modules(module_chains, call_of_node, np.arange(len(call_of_node)))
    host_forward = union_lengths(
        forward_pairs[0], module_calls.start_ns[forward_pairs[1]], module_calls.end_ns[forward_pairs[1]], len(module_labels)
    )
    host_backward = union_lengths(
        np.concatenate([backward_pairs[0], node_pairs[0]]),
        np.concatenate([module_calls.start_ns[backward_pairs[1]], nodes.start_ns[node_pairs[1]]]),
        np.concatenate([module_calls.end_ns[backward_pairs[1]], nodes.end_ns[node_pairs[1]]]),
        len(module_labels),
    )
    device_times = (
        _compute_device_times(trace, activities, nesting, module_chains, is_recomputed, nodes, call_of_node, len(module_labels))
        if activities.source == "gpu"
        else None
    )
    call_counts = np.bincount(module_of_call[~is_recomputed], minlength=len(module_labels))
    parent_calls = nesting.parent[first_calls]
    module_names = [trace.labels[label_index].removeprefix(MODULE_PREFIX) for label_index in module_labels]
    depths = [sum(1 for module_index in module_chains[call] if module_index >= 0) - 1 for call in first_calls]
    return [
        LayerTime(
            name=module_names[index],
            parent=module_names[module_of_call[parent_calls[index]]] if parent_calls[index] >= 0 else "",
            depth=max(0, depths[index]),
            calls=int(call_counts[index]),
            forward_host_ns=int(host_forward[index]),
            backward_host_ns=int(host_backward[index]) if has_sequences else None,
            forward_ns=None if device_times is None else int(device_times[0][index]),
            backward_ns=int(device_times[1][index]) if device_times is not None and has_sequences else None,
            communication_ns=None if device_times is None else int(device_times[2][index]),
        )
        for index in np.argsort(first_calls, kind="stable").tolist()
    ]


def _find_module_chains(parent_of_call: NDArray[np.intp], module: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each call of a module, the called module and all modules around it, the innermost first. Each module occurs once.

    Shape (number of calls, greatest number of modules of a call). Shorter rows are filled up with -1.
    """
    chains: list[list[int]] = []
    module_of_call = module.tolist()
    # a parent comes before its children, because calls are sorted by start
    for call, caller in enumerate(parent_of_call.tolist()):
        if caller == -2:
            chains.append([])
        else:
            chains.append(list(dict.fromkeys([module_of_call[call], *(chains[caller] if caller >= 0 else [])])))
    chain_width = min(MOST_LEVELS, max(map(len, chains)))
    return np.array([[*chain, *[-1] * (chain_width - len(chain))] for chain in chains], np.intp).reshape(
        len(chains), chain_width
    )


def _pair_with_modules(
    chains: NDArray[np.intp], calls: NDArray[np.intp], rows: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pair each row with all modules of the call to which the row belongs. Returns (module of each pair, row of each pair).

    chains: the modules of each call, from `_find_module_chains`. calls: for each of `rows`, the index of its call.
    """
    modules_of_row = chains[calls]
    is_module = modules_of_row >= 0
    return modules_of_row[is_module], np.broadcast_to(rows[:, None], modules_of_row.shape)[is_module]


def _starts_in_autograd(trace: Trace, calls: EventSpans) -> NDArray[np.bool_]:
    """Which calls of modules start during a node of autograd on the same thread."""
    node_spans = select_spans(trace, gloo.find_autograd(trace))
    return find_containing_spans(compute_nesting(node_spans).segments, calls.thread, calls.start_ns) >= 0


def _find_nodes(trace: Trace, calls: EventSpans, nested: Nesting) -> tuple[EventSpans, NDArray[np.intp]]:
    """Find the nodes of autograd whose operators run inside calls of modules.

    Returns (these nodes, for each node the index of the innermost call in which its operator runs).
    """
    details = trace.details
    operators, sequence_number, forward_thread = details.operators, details.sequence_number, details.forward_thread
    is_wrapper = trace.match_labels(operators.name, [label.startswith(gloo.AUTOGRAD_NODE) for label in trace.labels])
    node_rows, forward_rows = np.flatnonzero(is_wrapper & (forward_thread > 0)), np.flatnonzero(forward_thread == 0)
    maker_rows = _find_makers(operators, sequence_number, node_rows, forward_rows, forward_thread)
    node_rows = node_rows[maker_rows >= 0]
    maker_rows = maker_rows[maker_rows >= 0]
    segment_rows = find_containing_spans(nested.segments, operators.thread[maker_rows], operators.start_ns[maker_rows])
    node_rows, call_of_node = node_rows[segment_rows >= 0], nested.segments.name[segment_rows[segment_rows >= 0]]
    node_spans = operators.select(node_rows)
    is_in_steps = gloo.starts_in_steps(trace, node_spans.start_ns)
    return node_spans.select(is_in_steps), call_of_node[is_in_steps].astype(np.intp)


def _find_makers(
    operators: EventSpans,
    sequence_number: NDArray[np.int64],
    node_rows: NDArray[np.intp],
    forward_rows: NDArray[np.intp],
    forward_thread: NDArray[np.int64],
) -> NDArray[np.intp]:
    """For each node of autograd, the index of the operator of the forward pass that made the node; -1 if the operator is not
    known.

    The operator is the last one before the node, on the thread of the forward pass, that has the sequence number of the node.
    Kineto numbers the thread of the forward pass differently from other threads. So the thread whose operators match most of
    the nodes is used.
    """
    makers = np.full(len(node_rows), -1, np.intp)
    sorted_rows = forward_rows[
        np.lexsort((operators.start_ns[forward_rows], sequence_number[forward_rows], operators.thread[forward_rows]))
    ]
    for thread_number in np.unique(forward_thread[node_rows]):
        thread_nodes = np.flatnonzero(forward_thread[node_rows] == thread_number)
        most_matches = np.full(len(thread_nodes), -1, np.intp)
        for candidate_thread in np.unique(operators.thread[sorted_rows]):
            thread_rows = sorted_rows[operators.thread[sorted_rows] == candidate_thread]
            matches = _find_last_before(operators, sequence_number, thread_rows, node_rows[thread_nodes])
            if np.count_nonzero(matches >= 0) > np.count_nonzero(most_matches >= 0):
                most_matches = matches
        makers[thread_nodes] = most_matches
    return makers


def _find_last_before(
    operators: EventSpans, sequence_number: NDArray[np.int64], operator_rows: NDArray[np.intp], node_rows: NDArray[np.intp]
) -> NDArray[np.intp]:
    """For each node, the index of the last operator before the node that has the sequence number of the node; -1 if there is
    none.

    operator_rows: the indexes of the operators, sorted by sequence number, then by start.
    """
    moments_ns = np.concatenate([operators.start_ns[operator_rows], operators.start_ns[node_rows]])
    sequence_numbers = np.concatenate([sequence_number[operator_rows], sequence_number[node_rows]])
    is_node = np.arange(len(moments_ns)) >= len(operator_rows)
    order = np.lexsort((is_node, moments_ns, sequence_numbers))
    last_position = np.maximum.accumulate(np.where(is_node[order], -1, np.arange(len(order))))
    candidate = order[np.maximum(last_position, 0)]
    is_match = (last_position >= 0) & (sequence_numbers[candidate] == sequence_numbers[order]) & is_node[order]
    last_operator = np.full(len(moments_ns), -1, np.intp)
    last_operator[order[is_match]] = operator_rows[candidate[is_match]]
    return last_operator[len(operator_rows) :]


def _compute_device_times(
    trace: Trace,
    activities: Activities,
    nested: Nesting,
    chains: NDArray[np.intp],
    is_recomputed: NDArray[np.bool_],
    nodes: EventSpans,
    call_of_node: NDArray[np.intp],
    module_count: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns (time of forward, time of backward, time of collectives) on the GPU, each as an array with one value per
    module, in ns."""
    with_launch = np.flatnonzero(activities.launch_row >= 0)
    launch_rows = activities.launch_row[with_launch]
    thread, launch_ns = trace.thread[launch_rows], trace.start_ns[launch_rows]
    call_segment = find_containing_spans(nested.segments, thread, launch_ns)
    call_of_launch = (
        np.where(call_segment >= 0, nested.segments.name[call_segment], -1) if len(nested.segments.name) else call_segment
    )
    node_segments = compute_nesting(nodes).segments
    node_segment = find_containing_spans(node_segments, thread, launch_ns)
    node_of_launch = (
        np.where(node_segment >= 0, node_segments.name[node_segment], -1) if len(node_segments.name) else node_segment
    )
    rows_in_calls, rows_in_nodes = np.flatnonzero(call_of_launch >= 0), np.flatnonzero(node_of_launch >= 0)
    module, row = _pair_with_modules(chains, call_of_launch[rows_in_calls], rows_in_calls)
    module_of_node, row_of_node = _pair_with_modules(chains, call_of_node[node_of_launch[rows_in_nodes]], rows_in_nodes)
    is_backward = np.concatenate([is_recomputed[call_of_launch[row]], np.ones(len(row_of_node), bool)])
    module, row = np.concatenate([module, module_of_node]), np.concatenate([row, row_of_node])
    event_rows = activities.event_rows[with_launch][row]
    is_collective = activities.is_collective[with_launch][row]

    def measure_union(chosen_rows: NDArray[np.bool_]) -> NDArray[np.int64]:
        return union_lengths(
            module[chosen_rows], trace.start_ns[event_rows[chosen_rows]], trace.end_ns[event_rows[chosen_rows]], module_count
        )

    return (
        measure_union(~is_collective & ~is_backward),
        measure_union(~is_collective & is_backward),
        measure_union(is_collective),
    )
