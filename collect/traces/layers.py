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
from collect.traces.nesting import MOST_LEVELS, Nesting, compute_nesting, find_containing_spans, measure_unions, select_spans
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


def count_shown_layers(layers: Sequence[Any]) -> int:
    """How many of the modules from `sum_layers` a table shows: MOST_LAYERS, or all that no other module calls."""
    return max(MOST_LAYERS, sum(not layer.parent for layer in layers))


def _arrange_tree(layers: Sequence[LayerTime]) -> list[LayerTime]:
    """The modules as a tree: each before the modules that it calls, those of one caller by time, the longest first.

    The modules that a table shows come first: all that no other module calls, and the longest others with all their callers.
    """
    layer_by_name = {layer.name: layer for layer in layers}
    longest_first = sorted(layers, key=lambda layer: -(layer.forward + (layer.backward or 0)))
    children_by_parent: dict[str, list[LayerTime]] = {}
    for layer in longest_first:
        children_by_parent.setdefault(layer.parent if layer.parent in layer_by_name else "", []).append(layer)
    ordered_layers: list[LayerTime] = []
    pending_layers = children_by_parent.pop("", [])[::-1]
    while pending_layers:
        ordered_layers.append(pending_layers.pop())
        pending_layers += children_by_parent.pop(ordered_layers[-1].name, [])[::-1]
    shown_names = {layer.name for layer in layers if layer.parent not in layer_by_name}
    most_shown_count = max(MOST_LAYERS, len(shown_names))
    for layer in longest_first:
        caller_chain = [layer]
        while caller_chain[-1].parent in layer_by_name and caller_chain[-1].name not in shown_names:
            caller_chain.append(layer_by_name[caller_chain[-1].parent])
        new_names = {chain_layer.name for chain_layer in caller_chain} - shown_names
        if len(shown_names) + len(new_names) <= most_shown_count:
            shown_names |= new_names
    return sorted(ordered_layers, key=lambda layer: layer.name not in shown_names)


def compute_layer_times(trace: Trace, activities: Activities) -> list[LayerTime]:
    """The times of the modules in the order of their first calls; empty if the trace has no calls of modules."""
    module_calls = trace.details.modules
    call_rows = np.lexsort((-module_calls.end_ns, module_calls.start_ns))
    call_rows = call_rows[gloo.find_moments_in_steps(trace, module_calls.start_ns)[call_rows]]
    if not len(call_rows):
        return []
    module_calls = module_calls.select(call_rows)
    nesting = compute_nesting(module_calls)
    module_labels, first_calls, module_of_call = np.unique(module_calls.name, return_index=True, return_inverse=True)
    module_chains = _find_module_chains(nesting.parent, module_of_call)
    is_recomputed = _find_recomputed_calls(trace, module_calls)
    nodes, call_of_node = _find_autograd_nodes(trace, module_calls, nesting)
    has_sequences = len(trace.details.sequence_number) > 0
    # (modules, spans): one entry for each span and each module that contains the span. The spans of `forward` are calls in the
    # forward pass, those of `backward` calls that compute activations again, those of `node_rows` nodes of autograd.
    forward_pairs = _pair_with_modules(module_chains, np.flatnonzero(~is_recomputed), np.flatnonzero(~is_recomputed))
    backward_pairs = _pair_with_modules(module_chains, np.flatnonzero(is_recomputed), np.flatnonzero(is_recomputed))
    node_pairs = _pair_with_modules(module_chains, call_of_node, np.arange(len(call_of_node)))
    forward_host_ns = measure_unions(
        forward_pairs[0], module_calls.start_ns[forward_pairs[1]], module_calls.end_ns[forward_pairs[1]], len(module_labels)
    )
    backward_host_ns = measure_unions(
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
    depth_by_module = [sum(1 for module_index in module_chains[call] if module_index >= 0) - 1 for call in first_calls]
    return [
        LayerTime(
            name=module_names[index],
            parent=module_names[module_of_call[parent_calls[index]]] if parent_calls[index] >= 0 else "",
            depth=max(0, depth_by_module[index]),
            calls=int(call_counts[index]),
            forward_host_ns=int(forward_host_ns[index]),
            backward_host_ns=int(backward_host_ns[index]) if has_sequences else None,
            forward_ns=None if device_times is None else int(device_times[0][index]),
            backward_ns=int(device_times[1][index]) if device_times is not None and has_sequences else None,
            communication_ns=None if device_times is None else int(device_times[2][index]),
        )
        for index in np.argsort(first_calls, kind="stable").tolist()
    ]


def _find_module_chains(parent_of_call: NDArray[np.intp], module_by_call: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each call of a module, the called module and all modules around it, the innermost first. Each module occurs once.

    Shape (number of calls, greatest number of modules of a call). Shorter rows are filled up with -1.
    """
    chains: list[list[int]] = []
    module_list = module_by_call.tolist()
    # a parent comes before its children, because calls are sorted by start
    for call, caller_call in enumerate(parent_of_call.tolist()):
        if caller_call == -2:
            chains.append([])
        else:
            chains.append(list(dict.fromkeys([module_list[call], *(chains[caller_call] if caller_call >= 0 else [])])))
    chain_width = min(MOST_LEVELS, max(map(len, chains)))
    return np.array([[*chain, *[-1] * (chain_width - len(chain))] for chain in chains], np.intp).reshape(
        len(chains), chain_width
    )


def _pair_with_modules(
    chain_by_call: NDArray[np.intp], call_by_row: NDArray[np.intp], paired_rows: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pair each row with all modules of the call to which the row belongs. Returns (module of each pair, row of each pair).

    chain_by_call: the modules of each call, from `_find_module_chains`. call_by_row: for each of `paired_rows`, the index of
    its call."""
    modules_of_row = chain_by_call[call_by_row]
    is_module = modules_of_row >= 0
    return modules_of_row[is_module], np.broadcast_to(paired_rows[:, None], modules_of_row.shape)[is_module]


def _find_recomputed_calls(trace: Trace, module_calls: EventSpans) -> NDArray[np.bool_]:
    """Which calls of modules start during a node of autograd on the same thread."""
    node_spans = select_spans(trace, gloo.find_autograd_nodes(trace))
    return find_containing_spans(compute_nesting(node_spans).segments, module_calls.thread, module_calls.start_ns) >= 0


def _find_autograd_nodes(trace: Trace, module_calls: EventSpans, nesting: Nesting) -> tuple[EventSpans, NDArray[np.intp]]:
    """Find the nodes of autograd whose operators run inside calls of modules.

    Returns (these nodes, for each node the index of the innermost call in which its operator runs).
    """
    details = trace.details
    operators, sequence_number, forward_thread = details.operators, details.sequence_number, details.forward_thread
    is_wrapper = trace.match_labels(operators.name, [label.startswith(gloo.AUTOGRAD_NODE) for label in trace.labels])
    node_rows, forward_rows = np.flatnonzero(is_wrapper & (forward_thread > 0)), np.flatnonzero(forward_thread == 0)
    maker_rows = _find_node_makers(operators, sequence_number, node_rows, forward_rows, forward_thread)
    node_rows = node_rows[maker_rows >= 0]
    maker_rows = maker_rows[maker_rows >= 0]
    segment_rows = find_containing_spans(nesting.segments, operators.thread[maker_rows], operators.start_ns[maker_rows])
    node_rows, call_of_node = node_rows[segment_rows >= 0], nesting.segments.name[segment_rows[segment_rows >= 0]]
    node_spans = operators.select(node_rows)
    is_in_steps = gloo.find_moments_in_steps(trace, node_spans.start_ns)
    return node_spans.select(is_in_steps), call_of_node[is_in_steps].astype(np.intp)


def _find_node_makers(
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
    maker_by_node = np.full(len(node_rows), -1, np.intp)
    sorted_rows = forward_rows[
        np.lexsort((operators.start_ns[forward_rows], sequence_number[forward_rows], operators.thread[forward_rows]))
    ]
    for thread_number in np.unique(forward_thread[node_rows]):
        nodes_of_thread = np.flatnonzero(forward_thread[node_rows] == thread_number)
        best_matches = np.full(len(nodes_of_thread), -1, np.intp)
        for candidate_thread in np.unique(operators.thread[sorted_rows]):
            thread_rows = sorted_rows[operators.thread[sorted_rows] == candidate_thread]
            thread_matches = _find_last_operator_before(operators, sequence_number, thread_rows, node_rows[nodes_of_thread])
            if np.count_nonzero(thread_matches >= 0) > np.count_nonzero(best_matches >= 0):
                best_matches = thread_matches
        maker_by_node[nodes_of_thread] = best_matches
    return maker_by_node


def _find_last_operator_before(
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
    candidate_rows = order[np.maximum(last_position, 0)]
    is_match = (last_position >= 0) & (sequence_numbers[candidate_rows] == sequence_numbers[order]) & is_node[order]
    last_operator = np.full(len(moments_ns), -1, np.intp)
    last_operator[order[is_match]] = operator_rows[candidate_rows[is_match]]
    return last_operator[len(operator_rows) :]


def _compute_device_times(
    trace: Trace,
    activities: Activities,
    nesting: Nesting,
    chains: NDArray[np.intp],
    is_recomputed: NDArray[np.bool_],
    node_spans: EventSpans,
    call_of_node: NDArray[np.intp],
    module_count: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns (time of forward, time of backward, time of collectives) on the GPU, each as an array with one value per
    module, in ns."""
    launched_events = np.flatnonzero(activities.launch_row >= 0)
    launch_rows = activities.launch_row[launched_events]
    launch_threads, launch_ns = trace.thread[launch_rows], trace.start_ns[launch_rows]
    call_segment = find_containing_spans(nesting.segments, launch_threads, launch_ns)
    call_of_launch = (
        np.where(call_segment >= 0, nesting.segments.name[call_segment], -1) if len(nesting.segments.name) else call_segment
    )
    node_segments = compute_nesting(node_spans).segments
    node_segment = find_containing_spans(node_segments, launch_threads, launch_ns)
    node_of_launch = (
        np.where(node_segment >= 0, node_segments.name[node_segment], -1) if len(node_segments.name) else node_segment
    )
    rows_in_calls, rows_in_nodes = np.flatnonzero(call_of_launch >= 0), np.flatnonzero(node_of_launch >= 0)
    module, launch_by_pair = _pair_with_modules(chains, call_of_launch[rows_in_calls], rows_in_calls)
    module_by_node_pair, row_of_node = _pair_with_modules(chains, call_of_node[node_of_launch[rows_in_nodes]], rows_in_nodes)
    is_backward = np.concatenate([is_recomputed[call_of_launch[launch_by_pair]], np.ones(len(row_of_node), bool)])
    module, launch_by_pair = (np.concatenate([module, module_by_node_pair]), np.concatenate([launch_by_pair, row_of_node]))
    event_rows = activities.event_rows[launched_events][launch_by_pair]
    is_collective = activities.is_collective[launched_events][launch_by_pair]

    def measure_union(chosen_rows: NDArray[np.bool_]) -> NDArray[np.int64]:
        return measure_unions(
            module[chosen_rows], trace.start_ns[event_rows[chosen_rows]], trace.end_ns[event_rows[chosen_rows]], module_count
        )

    return (
        measure_union(~is_collective & ~is_backward),
        measure_union(~is_collective & is_backward),
        measure_union(is_collective),
    )
