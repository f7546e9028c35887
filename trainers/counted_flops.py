"""Counts the floating-point operations of a model, and finds parameters that get no gradient, without memory for the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainers.task import Batch

if TYPE_CHECKING:
    from trainers.task import Task

SOURCE = "matrix products, convolutions and attention of forward and backward, counted by torch.utils.flop_counter"


class Counted(NamedTuple):
    """flops: of forward and backward for one unit. unused: names of parameters without a gradient."""

    flops: float
    unused: list[str]


def of(task: Task, items: Batch) -> Counted:
    """By SOURCE, on the meta device. items: one item. Raises what the model raises if it cannot compute without data."""
    batch = Batch(items.inputs.to("meta"), items.targets.to("meta"))
    with torch.device("meta"):
        model = task.model().eval()  # a BatchNorm in training needs more than one item
    with counter() as counted:
        task.criterion(task.outputs(model, batch), batch.targets).backward()  # type: ignore[no-untyped-call]
    unused = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    return Counted(float(counted.get_total_flops()) / task.units_per_item, unused)


def counter() -> FlopCounterMode:
    """A context that counts operations by SOURCE; `flop_registry` has its formulas."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _backward_of_convolution})


def _backward_of_convolution(
    gradient: torch.Size,
    inputs: torch.Size,
    weight: torch.Size,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    *more: Any,
    **named: Any,
) -> int:
    """Each of the two gradients takes as many operations as forward; torch's own count forgets groups in that of the weight."""
    outputs = inputs if transposed else gradient  # of the convolution whose every output sums over the weights of a channel
    gradients: int = sum(more[2][:2])  # whether of the inputs, and whether of the weight
    return 2 * gradients * math.prod(outputs) * math.prod(weight[1:])


def of_task(task: Task) -> float | None:
    """The operations of forward and backward for a unit; None if the model cannot compute without data."""
    try:
        return of(task, task.fetch(np.arange(1), torch.device("cpu"))).flops or None
    except Exception:  # noqa: BLE001 - a model of a library, on a device without data; `jobs plan` says why
        return None
