"""Counts the floating-point operations of a model and the parameters of its blocks, and finds parameters without a gradient.

The model is built on torch's meta device, so it needs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from trainers.task import Batch

if TYPE_CHECKING:
    from trainers.task import Task

# on the meta device; products with weights are other operators
ATTENTION_OPERATORS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
FLOPS_SOURCE = "matrix products, convolutions and attention of forward and backward, counted by torch.utils.flop_counter"


class ExpertProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context for products of tensors without memory with experts. torch 2.13 refuses them except in bf16, although it
    multiplies real tensors of each dtype."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is not torch.ops.aten._grouped_mm.default:
            return operator(*args, **(kwargs or {}))
        return operator(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).to(args[0].dtype)


class FlopCount(NamedTuple):
    """What was counted in a model."""

    flops: float
    """Floating-point operations of forward and backward for one unit (a token, an image)."""
    unused_parameters: list[str]
    """Names of the parameters that got no gradient."""
    block_flops: float
    """The operations of all blocks for one item."""
    attention_flops: float
    """The part of block_flops in products of two tensors that are no weights."""


def count_flops(task: Task, example: Batch) -> FlopCount:
    """Count the operations of a model on the meta device; the text SOURCE lists which operations count. example: a batch of one
    item.

    If the model cannot compute without real data, the error of the model is raised.
    """
    batch = Batch(example.inputs.to("meta"), example.targets.to("meta"))
    with torch.device("meta"):
        model = task.model().eval()  # not in training mode, in which BatchNorm needs more than one item
    with ExpertProducts(), make_flop_counter() as flop_mode:  # type: ignore[no-untyped-call]
        task.criterion(task.outputs(model, batch), batch.targets).backward()  # type: ignore[no-untyped-call]
    unused_parameters = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    counts, names = flop_mode.get_flop_counts(), {module: name for name, module in model.named_modules()}
    flops_by_block = [counts.get(f"{type(model).__name__}.{names[block]}", {}) for block in dict.fromkeys(task.blocks(model))]
    attention_flops = sum(block.get(operator, 0) for block in flops_by_block for operator in ATTENTION_OPERATORS)
    flops = float(flop_mode.get_total_flops()) / task.units_per_item
    return FlopCount(flops, unused_parameters, sum(sum(block.values()) for block in flops_by_block), attention_flops)


def count_block_parameters(blocks: Sequence[nn.Module]) -> tuple[int, ...]:
    """The number of trainable parameters of each block. A parameter that several blocks share counts in the first of them."""
    counted_parameters: set[nn.Parameter] = set()
    parameter_counts = []
    for block in blocks:
        new_parameters = {parameter for parameter in block.parameters() if parameter.requires_grad} - counted_parameters
        parameter_counts.append(sum(parameter.numel() for parameter in new_parameters))
        counted_parameters |= new_parameters
    return tuple(parameter_counts)


def make_flop_counter() -> FlopCounterMode:
    """A context that counts operations as the text SOURCE says, by torch's formulas except for the backward of convolutions."""
    formulas: dict[Any, Any] = {torch.ops.aten.convolution_backward: _count_convolution_backward_flops}
    # a row or column of `left` belongs to one expert, so the number of experts does not count
    formulas[torch.ops.aten._grouped_mm] = lambda left, right, *_, **__: 2 * left[-2] * left[-1] * right[-1]
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _count_convolution_backward_flops(
    gradient: torch.Size,
    inputs: torch.Size,
    weight: torch.Size,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    *other_arguments: Any,
    **keyword_arguments: Any,
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


def count_task_flops(task: Task) -> float | None:
    """Floating-point operations of forward and backward for one unit; None if the model cannot compute without real data."""
    try:
        return count_flops(task, task.fetch(np.arange(1), torch.device("cpu"))).flops or None
    except Exception:  # noqa: BLE001 - a library's model may raise anything on the meta device; `jobs plan` shows the reason
        return None
