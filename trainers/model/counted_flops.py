"""Counts floating-point operations by the formulas of torch, and the parameters of a model's blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

SOURCE = "matrix products, convolutions and attention of forward and backward, counted by torch.utils.flop_counter"


def count_block_parameters(blocks: Sequence[nn.Module]) -> tuple[int, ...]:
    """The number of trainable parameters of each block. A parameter that several blocks share counts in the first of them."""
    counted_parameters: set[nn.Parameter] = set()
    sizes = []
    for block in blocks:
        new_parameters = {parameter for parameter in block.parameters() if parameter.requires_grad} - counted_parameters
        sizes.append(sum(parameter.numel() for parameter in new_parameters))
        counted_parameters |= new_parameters
    return tuple(sizes)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of matrix products, convolutions and attention in its `with` block.

    torch's FlopCounterMode is not used: for a tensor that is split over ranks (DTensor), it counts the operations of all ranks,
    and it keeps activations in memory that are recomputed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.convolutions = 0
        """All operations, and those of convolutions."""
        formulas = {
            torch.ops.aten.convolution_backward: _convolution_backward_flops,
            torch.ops.aten._grouped_mm: _grouped_product_flops,
        }
        self._formulas: dict[Any, Callable[..., int]] = {
            **FlopCounterMode(display=False, custom_mapping=formulas).flop_registry,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
        }

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(tensor_class, "__tensor_flatten__") for tensor_class in types):
            return NotImplemented  # then DTensor and similar classes call operators on their inner tensors: these are counted
        outputs = call_operator(operator, args, kwargs or {})
        if (formula := self._formulas.get(operator._overloadpacket)) is not None:
            self.count(operator._overloadpacket, args, outputs, formula(*args, **(kwargs or {}), out_val=outputs))
        return outputs

    def count(self, operator: Any, arguments: Any, outputs: Any, flops: int) -> None:
        """Add the operations of a call of an operator of torch."""
        self.flops += flops
        self.convolutions += flops if "convolution" in str(operator) else 0


def call_operator(operator: Any, arguments: Any, named: dict[str, Any]) -> Any:
    """Call an operator of torch with tensors without memory. torch 2.13 multiplies such matrices with experts only in bf16,
    but real ones in each dtype."""
    if operator is not torch.ops.aten._grouped_mm.default or arguments[0].dtype is torch.bfloat16:
        return operator(*arguments, **named)
    left, right, *others = arguments
    return operator(left.bfloat16(), right.bfloat16(), *others, **named).to(left.dtype)


def _grouped_product_flops(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    """The operations of products of matrices with experts. Each row or column belongs to one expert, so the number of experts
    does not count. left, right: the shapes of the factors, of which one or both have no dimension of experts."""
    return 2 * left[-2] * left[-1] * right[-1]


def _convolution_backward_flops(
    gradient: torch.Size,
    inputs: torch.Size,
    weight: torch.Size,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    *other_arguments: Any,
    **named: Any,
) -> int:
    """The operations of a convolution's backward. The arguments are the arguments of torch's `aten.convolution_backward`, with
    the shape of each tensor instead of the tensor.

    The gradient of the inputs and the gradient of the weight each need as many operations as forward. Torch's own formula is
    not used, because it ignores the groups of a convolution in the gradient of the weight.
    """
    # `outputs` is the shape of the tensor in which each element is a sum over all weights of one channel: the outputs of a
    # convolution, or, for a transposed convolution, the gradient of its inputs.
    outputs = inputs if transposed else gradient
    computed_gradients: int = sum(other_arguments[2][:2])  # output_mask: whether the gradients of inputs and weight are needed
    return 2 * computed_gradients * math.prod(outputs) * math.prod(weight[1:])
