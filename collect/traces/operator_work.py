"""Counts the FLOPs of an operator, and the bytes that it must at least read and write, from the shapes and types of its inputs.

The formulas for FLOPs are those of `torch.utils.flop_counter`, but causal attention counts half, because its kernels leave out
the other half. Bytes count every input and output once, so a kernel that reads an input twice moves more. No number is given
for an operator without a formula. Element-wise operators, normalisations and reductions are bound by their bytes, so their
FLOPs are not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collect.traces.input_shapes import InputTensor, has_tensor_lists, read_input_integers, read_input_tensors, sum_tensor_bytes
from collect.traces.kernel_categories import WorkCategory
from collect.traces.matrix_products import find_factor_positions, parse_product_sizes
from collect.traces.trace import InputTexts
from shardlab.hardware.gpu_models import find_gpu_model, find_model_peak_flops

_PRECISION_BY_TYPE = {"c10::Half": "fp16", "c10::BFloat16": "bf16", "float": "fp32"}
_TF32_KERNEL = re.compile(r"tf32|s1688|s16816|tensorop", re.IGNORECASE)
# For each operator of a convolution: the positions of stride, padding and dilation among its inputs; None: 1.
_CONVOLUTION_POSITIONS: dict[str, tuple[int, int, int | None]] = {
    "aten::convolution": (3, 4, 5),
    "aten::_convolution": (3, 4, 5),
    "aten::cudnn_convolution": (3, 2, 4),
    "aten::cudnn_convolution_relu": (3, 4, 5),
    "aten::miopen_convolution": (4, 3, 5),
    "aten::miopen_depthwise_convolution": (4, 3, 5),
    "aten::mkldnn_convolution": (4, 3, 5),
    "aten::_conv_depthwise2d": (4, 5, 6),
    "aten::conv_depthwise3d": (4, 5, 6),
    "aten::_slow_conv2d_forward": (4, 5, None),
}
_TRANSPOSED = {"aten::convolution": 6, "aten::_convolution": 6, "aten::convolution_backward": 7}
# For each operator of attention: the position of the query, whether heads come before the sequence, the position of is_causal.
_ATTENTION_POSITIONS: dict[str, tuple[int, bool, int]] = {
    "aten::_scaled_dot_product_flash_attention": (0, True, 4),
    "aten::_scaled_dot_product_efficient_attention": (0, True, 6),
    "aten::_scaled_dot_product_cudnn_attention": (0, True, 6),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, True, 4),
    "aten::_flash_attention_forward": (0, False, 8),
    "aten::_efficient_attention_forward": (0, False, 9),
    "aten::_cudnn_attention_forward": (0, True, 10),
    "aten::_flash_attention_backward": (1, False, 11),
    "aten::_efficient_attention_backward": (1, False, 12),
}
_OVERWRITING = re.compile(r"::(?:copy|fill|zero|normal|uniform|random|bernoulli)_\Z")


class OperatorWork(NamedTuple):
    """The work of one call of an operator. None: there is no formula, or the trace does not record what it needs."""

    flops: int | None
    bytes: int | None


def count_work(operator: str, category: WorkCategory, input_texts: InputTexts) -> OperatorWork:
    """The work of one call of an operator. category: the category of its kernels. input_texts: its inputs."""
    tensor_by_position = read_input_tensors(input_texts)
    if not tensor_by_position or has_tensor_lists(input_texts):
        return OperatorWork(None, None)
    inputs = list(tensor_by_position.values())
    if category == "matrix products":
        return _count_product(operator, tensor_by_position, input_texts)
    if category == "convolution":
        return _count_convolution(operator, tensor_by_position, input_texts)
    if category == "attention":
        return _count_attention(operator, tensor_by_position, input_texts)
    if category == "reduction":
        return OperatorWork(None, sum_tensor_bytes([*inputs, *(inputs[:1] if "softmax" in operator else [])]))
    if category == "normalisation":
        return OperatorWork(None, sum_tensor_bytes([*inputs, max(inputs, key=lambda tensor: math.prod(tensor.shape))]))
    if category in ("element-wise", "copies") and (result_shape := _find_broadcast_shape(inputs)) is not None:
        output_tensors = [] if _OVERWRITING.search(operator) else [InputTensor(result_shape, inputs[0].type_name)]
        return OperatorWork(None, sum_tensor_bytes([*inputs, *output_tensors]))
    return OperatorWork(None, None)


def find_precision(input_types: Sequence[str], kernel_names: Sequence[str]) -> str:
    """The precision in which an operator computes: fp32, tf32, bf16 or fp16; "" if it is not known.

    input_types: the types of its inputs. kernel_names: its kernels, whose names say whether fp32 is computed as TF32.
    """
    precision = next((_PRECISION_BY_TYPE[type_name] for type_name in input_types if type_name in _PRECISION_BY_TYPE), "")
    return "tf32" if precision == "fp32" and any(_TF32_KERNEL.search(kernel) for kernel in kernel_names) else precision


def compute_least_ns(flops: int | None, moved_bytes: int | None, gpu_name: str, precision: str) -> int | None:
    """The least time in which a GPU can do this work, by the peaks of its data sheet, in ns; None if a peak is not known.

    precision: fp32, tf32, bf16 or fp16; "" if it is not known.
    """
    gpu_model = find_gpu_model(gpu_name)
    if gpu_model is None:
        return None
    bounds_ns = [] if moved_bytes is None else [moved_bytes / gpu_model.memory_gb_per_s]
    if flops is not None:
        peak_flops_per_s = find_model_peak_flops(gpu_model, precision) if precision else None
        if peak_flops_per_s is None:
            return None
        bounds_ns.append(flops / peak_flops_per_s * 1e9)
    return round(max(bounds_ns)) if bounds_ns else None


def _count_product(operator: str, tensor_by_position: Mapping[int, InputTensor], input_texts: InputTexts) -> OperatorWork:
    product_sizes, factor_positions = parse_product_sizes(operator, input_texts.shapes), find_factor_positions(operator)
    if product_sizes is None or not tensor_by_position.keys() >= set(factor_positions):
        return OperatorWork(None, None)
    batch, m, n, k = product_sizes
    output = InputTensor((batch, m, n), tensor_by_position[factor_positions[0]].type_name)
    return OperatorWork(2 * batch * m * n * k, sum_tensor_bytes([*tensor_by_position.values(), output]))


def _count_convolution(operator: str, tensor_by_position: Mapping[int, InputTensor], input_texts: InputTexts) -> OperatorWork:
    """FLOPs: two for each element of the weight, at each place of the output (of the input, if the convolution is
    transposed)."""
    is_backward = operator == "aten::convolution_backward"
    data, weight_tensor = (tensor_by_position.get(input_position + is_backward) for input_position in (0, 1))
    if data is None or weight_tensor is None or len(data.shape) != len(weight_tensor.shape) or len(data.shape) < 3:
        return OperatorWork(None, None)
    is_transposed = (
        read_input_integers(input_texts, _TRANSPOSED[operator]) == [1] if operator in _TRANSPOSED else "transpose" in operator
    )
    if is_backward:
        output_mask, output = read_input_integers(input_texts, 10), tensor_by_position.get(0)
        pass_count = sum(output_mask[:2]) if output_mask else 0
        outputs = [tensor for tensor, is_wanted in zip((data, weight_tensor), output_mask or (), strict=False) if is_wanted]
    else:
        output, pass_count = _compute_convolution_output(operator, data, weight_tensor, input_texts), 1
        outputs = [output] if output else []
    if not pass_count or output is None or (is_transposed and not is_backward):
        return OperatorWork(None, None)
    place_tensor = data if is_transposed else output
    flops = 2 * place_tensor.shape[0] * math.prod(place_tensor.shape[2:]) * math.prod(weight_tensor.shape) * pass_count
    return OperatorWork(flops, sum_tensor_bytes([*tensor_by_position.values(), *outputs]))


def _compute_convolution_output(operator: str, data: InputTensor, weight: InputTensor, texts: InputTexts) -> InputTensor | None:
    if operator not in _CONVOLUTION_POSITIONS:
        return None
    space = len(data.shape) - 2
    setting_values = [[1] if index is None else read_input_integers(texts, index) for index in _CONVOLUTION_POSITIONS[operator]]
    stride, padding, dilation = (values * space if values and len(values) == 1 else values for values in setting_values)
    if not stride or padding is None or not dilation or {len(stride), len(padding), len(dilation)} != {space} or 0 in stride:
        return None
    output_sizes = [
        (size + 2 * pad - gap * (kernel_size - 1) - 1) // step + 1
        for size, kernel_size, step, pad, gap in zip(data.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    return InputTensor((data.shape[0], weight.shape[0], *output_sizes), data.type_name) if min(output_sizes) > 0 else None


def _count_attention(operator: str, tensor_by_position: Mapping[int, InputTensor], input_texts: InputTexts) -> OperatorWork:
    first, is_heads_first, causal_index = _ATTENTION_POSITIONS.get(operator, (0, True, 0))
    query, key, value = (tensor_by_position.get(first + tensor_offset) for tensor_offset in range(3))
    causal_values = read_input_integers(input_texts, causal_index)
    if not causal_values or query is None or key is None or value is None:
        return OperatorWork(None, None)
    if {len(tensor.shape) for tensor in (query, key, value)} != {4}:
        return OperatorWork(None, None)
    heads_axis, sequence_axis = (1, 2) if is_heads_first else (2, 1)
    query_key_pairs = query.shape[0] * query.shape[heads_axis] * query.shape[sequence_axis] * key.shape[sequence_axis]
    flops = 2 * query_key_pairs * (query.shape[3] + value.shape[3]) * (5 if first else 2) // 2 // (2 if causal_values[0] else 1)
    output_tensors = [query, key, value] if first else [InputTensor((*query.shape[:3], value.shape[3]), query.type_name)]
    return OperatorWork(flops, sum_tensor_bytes([query, key, value, *output_tensors, *([query] * 2 if first else [])]))


def _find_broadcast_shape(tensors: Sequence[InputTensor]) -> tuple[int, ...] | None:
    """The shape of the result of an element-wise operator; None if its inputs do not fit together."""
    reversed_shape: list[int] = []
    for tensor in tensors:
        for axis, axis_size in enumerate(reversed(tensor.shape)):
            if axis == len(reversed_shape):
                reversed_shape.append(axis_size)
            elif 1 not in (axis_size, reversed_shape[axis]) and axis_size != reversed_shape[axis]:
                return None
            else:
                reversed_shape[axis] = max(axis_size, reversed_shape[axis])
    return tuple(reversed(reversed_shape))
