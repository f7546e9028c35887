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

from collect.traces.input_shapes import Tensor, count_bytes, has_lists, read_tensors, read_values
from collect.traces.kernel_categories import Category
from collect.traces.matrix_products import find_factors, parse_product_sizes
from collect.traces.trace import InputTexts
from shardlab.hardware.gpu_models import find_gpu_model, find_model_peak_flops

_PRECISIONS = {"c10::Half": "fp16", "c10::BFloat16": "bf16", "float": "fp32"}
_TF32_KERNEL = re.compile(r"tf32|s1688|s16816|tensorop", re.IGNORECASE)
# For each operator of a convolution: the positions of stride, padding and dilation among its inputs; None: 1.
_CONVOLUTIONS: dict[str, tuple[int, int, int | None]] = {
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
_ATTENTIONS: dict[str, tuple[int, bool, int]] = {
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


class Work(NamedTuple):
    """The work of one call of an operator. None: there is no formula, or the trace does not record what it needs."""

    flops: int | None
    bytes: int | None


def count_work(operator: str, category: Category, texts: InputTexts) -> Work:
    """The work of one call of an operator. category: the category of its kernels. texts: its inputs."""
    tensors = read_tensors(texts)
    if not tensors or has_lists(texts):
        return Work(None, None)
    inputs = list(tensors.values())
    if category == "matrix products":
        return _count_product(operator, tensors, texts)
    if category == "convolution":
        return _count_convolution(operator, tensors, texts)
    if category == "attention":
        return _count_attention(operator, tensors, texts)
    if category == "reduction":
        return Work(None, count_bytes([*inputs, *(inputs[:1] if "softmax" in operator else [])]))
    if category == "normalisation":
        return Work(None, count_bytes([*inputs, max(inputs, key=lambda tensor: math.prod(tensor.shape))]))
    if category in ("element-wise", "copies") and (shape := _broadcast(inputs)) is not None:
        output = [] if _OVERWRITING.search(operator) else [Tensor(shape, inputs[0].type_name)]
        return Work(None, count_bytes([*inputs, *output]))
    return Work(None, None)


def find_precision(types: Sequence[str], kernels: Sequence[str]) -> str:
    """The precision in which an operator computes: fp32, tf32, bf16 or fp16; "" if it is not known.

    types: the types of its inputs. kernels: its kernels, whose names say whether fp32 is computed as TF32.
    """
    precision = next((_PRECISIONS[name] for name in types if name in _PRECISIONS), "")
    return "tf32" if precision == "fp32" and any(_TF32_KERNEL.search(kernel) for kernel in kernels) else precision


def compute_least_ns(flops: int | None, moved_bytes: int | None, gpu_name: str, precision: str) -> int | None:
    """The least time in which a GPU can do this work, by the peaks of its data sheet, in ns; None if a peak is not known.

    precision: fp32, tf32, bf16 or fp16; "" if it is not known.
    """
    gpu = find_gpu_model(gpu_name)
    if gpu is None:
        return None
    times_ns = [] if moved_bytes is None else [moved_bytes / gpu.memory_gb_per_s]
    if flops is not None:
        peak = find_model_peak_flops(gpu, precision) if precision else None
        if peak is None:
            return None
        times_ns.append(flops / peak * 1e9)
    return round(max(times_ns)) if times_ns else None


def _count_product(operator: str, tensors: Mapping[int, Tensor], texts: InputTexts) -> Work:
    sizes, factors = parse_product_sizes(operator, texts.shapes), find_factors(operator)
    if sizes is None or not tensors.keys() >= set(factors):
        return Work(None, None)
    batch, m, n, k = sizes
    output = Tensor((batch, m, n), tensors[factors[0]].type_name)
    return Work(2 * batch * m * n * k, count_bytes([*tensors.values(), output]))


def _count_convolution(operator: str, tensors: Mapping[int, Tensor], texts: InputTexts) -> Work:
    """FLOPs: two for each element of the weight, at each place of the output (of the input, if the convolution is
    transposed)."""
    is_backward = operator == "aten::convolution_backward"
    data, weight = (tensors.get(index + is_backward) for index in (0, 1))
    if data is None or weight is None or len(data.shape) != len(weight.shape) or len(data.shape) < 3:
        return Work(None, None)
    is_transposed = read_values(texts, _TRANSPOSED[operator]) == [1] if operator in _TRANSPOSED else "transpose" in operator
    if is_backward:
        output_mask, output = read_values(texts, 10), tensors.get(0)
        passes = sum(output_mask[:2]) if output_mask else 0
        outputs = [tensor for tensor, is_wanted in zip((data, weight), output_mask or (), strict=False) if is_wanted]
    else:
        output, passes = _find_output(operator, data, weight, texts), 1
        outputs = [output] if output else []
    if not passes or output is None or (is_transposed and not is_backward):
        return Work(None, None)
    places = data if is_transposed else output
    flops = 2 * places.shape[0] * math.prod(places.shape[2:]) * math.prod(weight.shape) * passes
    return Work(flops, count_bytes([*tensors.values(), *outputs]))


def _find_output(operator: str, data: Tensor, weight: Tensor, texts: InputTexts) -> Tensor | None:
    if operator not in _CONVOLUTIONS:
        return None
    space = len(data.shape) - 2
    settings = [[1] if index is None else read_values(texts, index) for index in _CONVOLUTIONS[operator]]
    stride, padding, dilation = (values * space if values and len(values) == 1 else values for values in settings)
    if not stride or padding is None or not dilation or {len(stride), len(padding), len(dilation)} != {space} or 0 in stride:
        return None
    sizes = [
        (size + 2 * pad - gap * (width - 1) - 1) // step + 1
        for size, width, step, pad, gap in zip(data.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    return Tensor((data.shape[0], weight.shape[0], *sizes), data.type_name) if min(sizes) > 0 else None


def _count_attention(operator: str, tensors: Mapping[int, Tensor], texts: InputTexts) -> Work:
    first, heads_first, causal_index = _ATTENTIONS.get(operator, (0, True, 0))
    query, key, value = (tensors.get(first + index) for index in range(3))
    causal = read_values(texts, causal_index)
    if not causal or query is None or key is None or value is None:
        return Work(None, None)
    if {len(tensor.shape) for tensor in (query, key, value)} != {4}:
        return Work(None, None)
    heads, sequence = (1, 2) if heads_first else (2, 1)
    pairs = query.shape[0] * query.shape[heads] * query.shape[sequence] * key.shape[sequence]
    flops = 2 * pairs * (query.shape[3] + value.shape[3]) * (5 if first else 2) // 2 // (2 if causal[0] else 1)
    outputs = [query, key, value] if first else [Tensor((*query.shape[:3], value.shape[3]), query.type_name)]
    return Work(flops, count_bytes([query, key, value, *outputs, *([query] * 2 if first else [])]))


def _broadcast(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The shape of the result of an element-wise operator; None if its inputs do not fit together."""
    shape: list[int] = []
    for tensor in tensors:
        for place, size in enumerate(reversed(tensor.shape)):
            if place == len(shape):
                shape.append(size)
            elif 1 not in (size, shape[place]) and size != shape[place]:
                return None
            else:
                shape[place] = max(size, shape[place])
    return tuple(reversed(shape))
