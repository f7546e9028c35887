"""Finds which attention kernels ran: flash, memory-efficient, cuDNN, flex, or the plain formula from matrix products and
softmax.

A call of attention is found by the operator to which torch.nn.functional.scaled_dot_product_attention dispatched, such as
aten::_scaled_dot_product_flash_attention. The time of the call is the time of all kernels that the operator launched; on a CPU,
it is the duration of the operator. Kernels that no such operator launched, such as kernels of the package flash-attn and of
torch.compile, are found by their names.

The backward pass of the plain formula consists of ordinary operators, which cannot be distinguished from other operators. So
only the forward pass of the plain formula is found.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo
from collect.traces.activities import Activities
from collect.traces.details import EventSpans
from collect.traces.nesting import find_containing_spans, find_outermost_spans, select_spans
from collect.traces.rank_sums import merge_rows
from collect.traces.trace import Trace

Backend = Literal["flash", "efficient", "cudnn", "flex", "fused", "math"]
_OPERATOR_PATTERNS: tuple[tuple[re.Pattern[str], Backend], ...] = (
    (re.compile(r"aten::_(?:scaled_dot_product_)?flash_attention|flash_attn(?:_\d)?::"), "flash"),
    (re.compile(r"aten::_(?:scaled_dot_product_)?efficient_attention"), "efficient"),
    (re.compile(r"aten::_(?:scaled_dot_product_)?cudnn_attention"), "cudnn"),
    (re.compile(r"aten::_scaled_dot_product_fused_attention"), "fused"),
    (re.compile(r"aten::_scaled_dot_product_attention_math"), "math"),
)
_KERNEL_PATTERNS: tuple[tuple[re.Pattern[str], Backend], ...] = (
    (re.compile(r"cudnn.*sdpa", re.IGNORECASE), "cudnn"),  # tried before flash, because a name of cuDNN may contain "flash"
    (re.compile(r"triton_\w*flex_attention"), "flex"),
    (re.compile(r"fmha_cutlass|AttentionBackwardKernel|\bAttentionKernel<"), "efficient"),
    (re.compile(r"\bflash::|\bpytorch_flash::|\bflash_(?:fwd|bwd)|FlashAttn(?:Fwd|Bwd)"), "flash"),
    (re.compile(r"aotriton|\battn_fwd\b|\bbwd_kernel_(?:dk_dv|dq|fuse)\b|FmhaFwd|FmhaBwd"), "flash"),  # the kernels of ROCm
)
_BACKWARD_PATTERN = re.compile(r"_backward|bwd|Backward|bprop", re.IGNORECASE)
MOST_KERNELS = 8  # the most kernel names in an AttentionUse


class AttentionUse(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one operator of attention on one rank, or of one kernel of attention that no such operator launched.

    All profiled steps count together.
    """

    backend: Backend
    """The implementation; `fused` is an implementation for devices other than CUDA and ROCm."""
    backward: bool
    """Whether this is the backward pass."""
    name: str
    """The name of the operator or kernel."""
    by: Literal["operator", "kernel"]
    """Whether `name` is an operator or a kernel."""
    calls: int
    """Number of calls."""
    total_ns: int | None
    """The time of the kernels (on a CPU: of the operator); None if no kernel is recorded."""
    kernels: list[str]
    """The names of at most MOST_KERNELS kernels that compute, the kernel with the longest time first; empty on a CPU."""


def sum_attention(uses: Iterable[AttentionUse]) -> list[AttentionUse]:
    """The attention of all ranks, added up by implementation, direction and name, the longest time first."""
    all_uses = list(uses)
    kernels_by_key: dict[Hashable, dict[str, None]] = {}
    for use in all_uses:
        kernels_by_key.setdefault(_make_sum_key(use), {}).update(dict.fromkeys(use.kernels))
    summed_uses = [
        msgspec.structs.replace(use, kernels=list(kernels_by_key[_make_sum_key(use)])[:MOST_KERNELS])
        for use in merge_rows(all_uses, _make_sum_key, ("calls", "total_ns"))
    ]
    return sorted(summed_uses, key=lambda entry: (-(entry.total_ns or 0), entry.backend, entry.name))


def _make_sum_key(use: AttentionUse) -> Hashable:
    return use.backend, use.backward, use.name, use.by


def find_attention(trace: Trace, activities: Activities) -> list[AttentionUse]:
    """Find the calls of attention in a trace: one entry per operator or kernel, longest time first; empty if there are no
    calls."""
    backend_by_label = [find_operator_backend(label) for label in trace.labels]
    has_backend = [backend is not None for backend in backend_by_label]
    operator_rows = np.flatnonzero(trace.match_labels(trace.name, has_backend) & trace.has_category("cpu_op"))
    operator_rows = operator_rows[gloo.find_moments_in_steps(trace, trace.start_ns[operator_rows])]
    operator_spans = select_spans(trace, operator_rows)
    operator_spans = operator_spans.select(find_outermost_spans(operator_spans))
    attention_uses = [
        _measure_operator(trace, activities, operator_spans, int(label_index), backend_by_label)
        for label_index in np.unique(operator_spans.name)
    ]
    attention_uses += _find_attention_kernels(trace, activities, _find_launching_spans(trace, activities, operator_spans) < 0)
    return sorted(attention_uses, key=lambda use: (-(use.total_ns or 0), use.backend, use.name))


def find_operator_backend(operator_name: str) -> Backend | None:
    return next((backend for pattern, backend in _OPERATOR_PATTERNS if pattern.match(operator_name)), None)


def find_kernel_backend(kernel_name: str) -> Backend | None:
    return next((backend for pattern, backend in _KERNEL_PATTERNS if pattern.search(kernel_name)), None)


def _find_launching_spans(trace: Trace, activities: Activities, spans: EventSpans) -> NDArray[np.intp]:
    """For each of `activities.event_rows`, the index of the span during which the work was launched; -1 if it was
    launched during no span."""
    launch_row_by_event = activities.launch_row
    span_by_event = np.full(len(launch_row_by_event), -1, np.intp)
    launch_known = launch_row_by_event >= 0
    launch_rows = launch_row_by_event[launch_known]
    span_by_event[launch_known] = find_containing_spans(spans, trace.thread[launch_rows], trace.start_ns[launch_rows])
    return span_by_event


def _measure_operator(
    trace: Trace, activities: Activities, spans: EventSpans, label_index: int, backend_by_label: list[Backend | None]
) -> AttentionUse:
    operator_spans = spans.select(spans.name == label_index)
    backend = backend_by_label[label_index]
    assert backend is not None
    if activities.source == "gpu":
        event_rows = activities.event_rows[_find_launching_spans(trace, activities, operator_spans) >= 0]
        total_ns = sum(trace.duration_ns[event_rows].tolist()) if len(event_rows) else None
        kernel_names = _select_longest_kernels(trace, event_rows[trace.has_category("kernel")[event_rows]])
    else:
        total_ns, kernel_names = sum((operator_spans.end_ns - operator_spans.start_ns).tolist()), []
    return AttentionUse(
        backend=backend,
        backward=_BACKWARD_PATTERN.search(trace.labels[label_index]) is not None,
        name=trace.labels[label_index],
        by="operator",
        calls=len(operator_spans.name),
        total_ns=total_ns,
        kernels=kernel_names,
    )


def _find_attention_kernels(trace: Trace, activities: Activities, outside_operators: NDArray[np.bool_]) -> list[AttentionUse]:
    """Find kernels of attention by their names. outside_operators: which of `activities.event_rows` were not launched by an
    operator of attention."""
    if activities.source != "gpu":
        return []
    event_rows = activities.event_rows[outside_operators & ~activities.is_collective]
    event_rows = event_rows[trace.has_category("kernel")[event_rows]]
    attention_uses = []
    for label_index in np.unique(trace.name[event_rows]):
        kernel_name = trace.labels[label_index]
        if (backend := find_kernel_backend(kernel_name)) is None:
            continue
        kernel_rows = event_rows[trace.name[event_rows] == label_index]
        attention_uses.append(
            AttentionUse(
                backend=backend,
                backward=_BACKWARD_PATTERN.search(kernel_name) is not None,
                name=kernel_name,
                by="kernel",
                calls=len(kernel_rows),
                total_ns=sum(trace.duration_ns[kernel_rows].tolist()),
                kernels=[kernel_name],
            )
        )
    return attention_uses


def _select_longest_kernels(trace: Trace, event_rows: NDArray[np.intp]) -> list[str]:
    name_labels, name_index = np.unique(trace.name[event_rows], return_inverse=True)
    total_ns = np.zeros(len(name_labels), np.int64)
    np.add.at(total_ns, name_index, trace.duration_ns[event_rows])
    return [trace.labels[name_labels[index]] for index in np.argsort(-total_ns, kind="stable")[:MOST_KERNELS]]
