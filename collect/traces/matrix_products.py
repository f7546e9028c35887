"""Computes the FLOP/s that matrix products achieve, from the shapes of their inputs and the time of their kernels.

A product of an M x K matrix and a K x N matrix needs 2 M N K FLOPs (a multiplication and an addition for each of M N K terms);
a batch of B such products needs B times as many. torch.profiler records the shapes with `record_shapes=True`.

On a GPU, the time is the sum of the durations of all kernels and memory operations that the operator launched, such as a
reduction after a product that was split along K. On a CPU, the time is the duration of the operator. If a product
calls another product, only the called product counts: aten::linear calls aten::addmm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo
from collect.traces.activities import Activities
from collect.traces.details import EventSpans
from collect.traces.nesting import find_containing_spans, is_innermost
from collect.traces.rank_sums import merge_rows
from collect.traces.trace import Trace
from shardlab.files.decoders import DECODE_FAULTS

# the most FLOPs of one call: no device can do more FLOPs, so larger shapes mean that the trace is damaged
_MOST_FLOPS = 1 << 60
_FACTOR_INDEXES = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
}


class MatrixProduct(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of an operator with the same shapes on one rank, in all profiled steps together."""

    operator: str
    """Its name, such as aten::mm."""
    batch: int
    """The number of products; 1 if the operator has no batch."""
    m: int
    """The number of rows of the result."""
    n: int
    """The number of columns of the result."""
    k: int
    """The length of the sums."""
    calls: int
    """The number of calls whose time is known."""
    total_ns: int
    """The time of these calls together."""
    untimed: int
    """The number of calls whose kernels are not recorded, such as calls that were captured into a CUDA graph."""

    @property
    def flops(self) -> int:
        """The FLOPs of all calls whose time is known."""
        return 2 * self.batch * self.m * self.n * self.k * self.calls

    @property
    def flops_per_s(self) -> float | None:
        """The FLOP/s that the calls achieve; None if the time of no call is known."""
        return self.flops / self.total_ns * 1e9 if self.total_ns else None


def sum_products(products: Iterable[MatrixProduct]) -> list[MatrixProduct]:
    """The matrix products of all ranks, added up by operator and sizes, the longest time first."""
    summed_products = merge_rows(
        products,
        lambda product: (product.operator, product.batch, product.m, product.n, product.k),
        ("calls", "total_ns", "untimed"),
    )
    return _sort_products(summed_products)


def _sort_products(products: Iterable[MatrixProduct]) -> list[MatrixProduct]:
    return sorted(
        products, key=lambda product: (-product.total_ns, product.operator, product.batch, product.m, product.n, product.k)
    )


def find_matrix_products(trace: Trace, activities: Activities) -> list[MatrixProduct]:
    """The matrix products of a trace, longest time first; empty if the trace records no shapes of matrix products."""
    details, product_rows = trace.details, _find_profiled(trace)
    product_spans = details.products.select(product_rows)
    time_ns, is_timed = _measure_products(trace, activities, product_rows)
    shape_index = details.shape_index[product_rows]
    # Each pair (name, shapes) is one number: to sort numbers takes a tenth of the time that np.unique takes to sort pairs.
    name_shape_pairs, pair_index = np.unique(
        product_spans.name.astype(np.int64) * len(details.shape_texts) + shape_index, return_inverse=True
    )
    total_ns = np.zeros(len(name_shape_pairs), np.int64)
    np.add.at(total_ns, pair_index, time_ns)
    calls, all_calls = (
        np.bincount(pair_indexes, minlength=len(total_ns)) for pair_indexes in (pair_index[is_timed], pair_index)
    )
    products = []
    for index, pair in enumerate(name_shape_pairs.tolist()):
        label_index, text_index = divmod(pair, len(details.shape_texts))
        operator = trace.labels[label_index]
        if (sizes := parse_product_sizes(operator, details.shape_texts[text_index])) is None:
            continue
        batch, m, n, k = sizes
        products.append(
            MatrixProduct(
                operator=operator,
                batch=batch,
                m=m,
                n=n,
                k=k,
                calls=int(calls[index]),
                total_ns=int(total_ns[index]),
                untimed=int(all_calls[index] - calls[index]),
            )
        )
    return _sort_products(products)


def find_timed_calls(trace: Trace, activities: Activities) -> EventSpans:
    """The calls that `find_matrix_products` counts: products of known sizes whose time is known, in the order of the file."""
    details, product_rows = trace.details, _find_profiled(trace)
    _, is_timed = _measure_products(trace, activities, product_rows)
    label_text_pairs = zip(
        details.products.name[product_rows].tolist(), details.shape_index[product_rows].tolist(), strict=True
    )
    is_sized = [
        parse_product_sizes(trace.labels[label_index], details.shape_texts[text_index]) is not None
        for label_index, text_index in label_text_pairs
    ]
    return details.products.select(product_rows[is_timed & np.array(is_sized, bool)])


def _find_profiled(trace: Trace) -> NDArray[np.intp]:
    """The products in the profiled steps that call no other product, as indexes in `trace.details.products`."""
    products = trace.details.products
    return np.flatnonzero(is_innermost(products) & gloo.starts_in_steps(trace, products.start_ns))


def parse_product_sizes(operator: str, shapes: bytes) -> tuple[int, int, int, int] | None:
    """The sizes (batch, m, n, k) of a matrix product. None if the inputs do not have the shapes of a matrix product.

    shapes: the JSON text of the shapes of the operator's inputs.
    """
    try:
        input_shapes = msgspec.json.decode(shapes)
    except DECODE_FAULTS:
        return None
    if not isinstance(input_shapes, list):
        return None
    first_factor, second_factor = _FACTOR_INDEXES.get(operator, (0, 1))
    if len(input_shapes) <= second_factor or not (
        _is_shape(input_shapes[first_factor]) and _is_shape(input_shapes[second_factor])
    ):
        return None
    sizes = (
        _linear_sizes(input_shapes[0], input_shapes[1])
        if operator == "aten::linear"
        else _matrix_sizes(input_shapes[first_factor], input_shapes[second_factor])
    )
    return sizes if sizes is not None and 0 < 2 * math.prod(sizes) < _MOST_FLOPS else None


def _linear_sizes(data: Sequence[int], weight: Sequence[int]) -> tuple[int, int, int, int] | None:
    if not data or len(weight) != 2 or data[-1] != weight[1]:
        return None
    return 1, math.prod(data[:-1]), weight[0], weight[1]


def _matrix_sizes(left: Sequence[int], right: Sequence[int]) -> tuple[int, int, int, int] | None:
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return None
    return math.prod(left[:-2]), left[-2], right[-1], left[-1]


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(size) is int and 0 <= size < 1 << 48 for size in value)


def _measure_products(
    trace: Trace, activities: Activities, product_rows: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns (time of each product in ns, whether the time of each product is known).

    product_rows: the indexes of the products in `trace.details.products`.
    """
    product_spans = trace.details.products.select(product_rows)
    if activities.source != "gpu":
        return product_spans.end_ns - product_spans.start_ns, np.ones(len(product_rows), bool)
    with_launch = np.flatnonzero(activities.launch_row >= 0)
    launch_rows, kernel_rows = activities.launch_row[with_launch], activities.event_rows[with_launch]
    product_index = find_containing_spans(product_spans, trace.thread[launch_rows], trace.start_ns[launch_rows])
    time_ns, kernel_counts = np.zeros((2, len(product_rows)), np.int64)
    np.add.at(time_ns, product_index[product_index >= 0], trace.duration_ns[kernel_rows[product_index >= 0]])
    np.add.at(kernel_counts, product_index[product_index >= 0], 1)
    return time_ns, kernel_counts > 0
