"""Computes the FLOP/s that matrix products achieve, from the shapes of their inputs and the time of their kernels.

A product of an M x K matrix and a K x N matrix needs 2 M N K FLOPs (a multiplication and an addition for each of M N K terms);
a batch of B such products needs B times as many. torch.profiler records the shapes with `record_shapes=True`.

On a GPU, the time is the sum of the durations of all kernels that the operator launched, such as a reduction after a product
that was split along K; copies that the operator launched are counted apart. On a CPU, the time is the duration of the operator.
If a product calls another product, only the called product counts: aten::linear calls aten::addmm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo
from collect.traces.activities import Activities
from collect.traces.details import EventSpans
from collect.traces.input_shapes import is_shape, parse_list
from collect.traces.nesting import find_containing_spans, find_innermost_spans, select_spans
from collect.traces.rank_sums import merge_rows
from collect.traces.trace import Trace

# the most FLOPs of one call: no device can do more FLOPs, so larger shapes mean that the trace is damaged
_MOST_CALL_FLOPS = 1 << 60
_PRODUCT_OPERATORS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"})
_FACTOR_POSITIONS = {"aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}  # positions of the factors among the inputs, if not (0, 1)


class MatrixProduct(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of an operator with the same shapes and types on one rank, in all profiled steps together."""

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
    dtype: str
    """The types of the two factors as torch writes them, such as `c10::Half`; "" if the trace does not record them."""
    calls: int
    """The number of calls whose time is known."""
    total_ns: int
    """The time of these calls together, without `copy_ns`."""
    copy_ns: int
    """The time of the copies and memory sets that these calls launched."""
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
    return _sort_products(merge_rows(products, _make_product_key, ("calls", "total_ns", "copy_ns", "untimed")))


def _make_product_key(product: MatrixProduct) -> tuple[str, int, int, int, int, str]:
    return product.operator, product.batch, product.m, product.n, product.k, product.dtype


def _sort_products(products: Iterable[MatrixProduct]) -> list[MatrixProduct]:
    return sorted(products, key=lambda product: (-product.total_ns, _make_product_key(product)))


def find_matrix_products(trace: Trace, activities: Activities) -> list[MatrixProduct]:
    """The matrix products of a trace, longest time first; empty if the trace records no shapes of matrix products."""
    product_rows = _find_product_rows(trace)
    kernel_ns, copy_ns, is_timed = _measure_products(trace, activities, product_rows)
    # Each pair (name, inputs) is one number: to sort numbers takes a tenth of the time that np.unique takes to sort pairs.
    pair_numbers, pair_by_product = np.unique(
        trace.name[product_rows].astype(np.int64) * len(trace.input_texts) + trace.inputs[product_rows], return_inverse=True
    )
    total_ns, total_copy_ns = np.zeros((2, len(pair_numbers)), np.int64)
    np.add.at(total_ns, pair_by_product, kernel_ns)
    np.add.at(total_copy_ns, pair_by_product, copy_ns)
    timed_counts, call_counts = (
        np.bincount(indexes, minlength=len(pair_numbers)) for indexes in (pair_by_product[is_timed], pair_by_product)
    )
    products = []
    for pair_index, pair_number in enumerate(pair_numbers.tolist()):
        label_index, text_index = divmod(pair_number, len(trace.input_texts))
        operator, input_texts = trace.labels[label_index], trace.input_texts[text_index]
        if (product_sizes := parse_product_sizes(operator, input_texts.shapes)) is None:
            continue
        batch, m, n, k = product_sizes
        products.append(
            MatrixProduct(
                operator=operator,
                batch=batch,
                m=m,
                n=n,
                k=k,
                dtype=_name_types(operator, input_texts.types),
                calls=int(timed_counts[pair_index]),
                total_ns=int(total_ns[pair_index]),
                copy_ns=int(total_copy_ns[pair_index]),
                untimed=int(call_counts[pair_index] - timed_counts[pair_index]),
            )
        )
    return sum_products(products)


def find_timed_calls(trace: Trace, activities: Activities) -> EventSpans:
    """The calls that `find_matrix_products` counts: products of known sizes whose time is known, in the order of the file."""
    product_rows = _find_product_rows(trace)
    _, _, is_timed = _measure_products(trace, activities, product_rows)
    is_sized = [
        parse_product_sizes(trace.labels[label_index], trace.input_texts[text_index].shapes) is not None
        for label_index, text_index in zip(trace.name[product_rows].tolist(), trace.inputs[product_rows].tolist(), strict=True)
    ]
    return select_spans(trace, product_rows[is_timed & np.array(is_sized, bool)])


def _find_product_rows(trace: Trace) -> NDArray[np.intp]:
    """The products of recorded shapes in the profiled steps that call no other product, as indexes of events."""
    is_product = trace.match_labels(trace.name, [label in _PRODUCT_OPERATORS for label in trace.labels])
    product_rows = np.flatnonzero(is_product & trace.has_category("cpu_op") & (trace.inputs > 0))
    product_rows = product_rows[find_innermost_spans(select_spans(trace, product_rows))]
    return product_rows[gloo.find_moments_in_steps(trace, trace.start_ns[product_rows])]


def _name_types(operator: str, types_text: bytes) -> str:
    """The types of the two factors as one text: one name if they are equal."""
    input_types = parse_list(types_text)
    factor_types = [input_types[index] for index in find_factor_positions(operator) if index < len(input_types)]
    return " and ".join(dict.fromkeys(entry for entry in factor_types if isinstance(entry, str) and entry))


def find_factor_positions(operator: str) -> tuple[int, int]:
    """The positions of the two factors among the inputs of an operator."""
    return _FACTOR_POSITIONS.get(operator, (0, 1))


def parse_product_sizes(operator: str, shapes_text: bytes) -> tuple[int, int, int, int] | None:
    """The sizes (batch, m, n, k) of a matrix product. None if the inputs do not have the shapes of a matrix product.

    shapes_text: the JSON text of the shapes of the operator's inputs.
    """
    input_shapes = parse_list(shapes_text)
    first_factor, second_factor = find_factor_positions(operator)
    if len(input_shapes) <= second_factor or not (
        is_shape(input_shapes[first_factor]) and is_shape(input_shapes[second_factor])
    ):
        return None
    product_sizes = (
        _compute_linear_sizes(input_shapes[0], input_shapes[1])
        if operator == "aten::linear"
        else _compute_matrix_sizes(input_shapes[first_factor], input_shapes[second_factor])
    )
    return product_sizes if product_sizes is not None and 0 < 2 * math.prod(product_sizes) < _MOST_CALL_FLOPS else None


def _compute_linear_sizes(data_shape: Sequence[int], weight_shape: Sequence[int]) -> tuple[int, int, int, int] | None:
    if not data_shape or len(weight_shape) != 2 or data_shape[-1] != weight_shape[1]:
        return None
    return 1, math.prod(data_shape[:-1]), weight_shape[0], weight_shape[1]


def _compute_matrix_sizes(left: Sequence[int], right_shape: Sequence[int]) -> tuple[int, int, int, int] | None:
    if len(left) != len(right_shape) or len(left) not in (2, 3) or left[-1] != right_shape[-2] or left[:-2] != right_shape[:-2]:
        return None
    return math.prod(left[:-2]), left[-2], right_shape[-1], left[-1]


def _measure_products(
    trace: Trace, activities: Activities, product_rows: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Returns (time of each product in ns, time of the memory operations of each product, whether its time is known).

    product_rows: the products as indexes of events in the trace.
    """
    product_spans = select_spans(trace, product_rows)
    kernel_ns, copy_ns, kernel_counts = np.zeros((3, len(product_rows)), np.int64)
    if activities.source != "gpu":
        return product_spans.end_ns - product_spans.start_ns, copy_ns, np.ones(len(product_rows), bool)
    launched_events = np.flatnonzero(activities.launch_row >= 0)
    launch_rows, event_rows = activities.launch_row[launched_events], activities.event_rows[launched_events]
    product_by_launch = find_containing_spans(product_spans, trace.thread[launch_rows], trace.start_ns[launch_rows])
    is_kernel = trace.has_category("kernel")[event_rows]
    for summed_ns, is_summed in ((kernel_ns, is_kernel), (copy_ns, ~is_kernel)):
        is_summed &= product_by_launch >= 0
        np.add.at(summed_ns, product_by_launch[is_summed], trace.duration_ns[event_rows[is_summed]])
    np.add.at(kernel_counts, product_by_launch[is_kernel], 1)
    return kernel_ns, copy_ns, kernel_counts > 0
