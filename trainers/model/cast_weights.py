"""Casts a model's fp32 weights to 16-bit copies for forward and backward.

FSDP2 (`fully_shard` with a MixedPrecisionPolicy) and DeepSpeed cast gathered weights in the same way; this module casts the
weights of models that are not sharded. Every operator computes in 16 bits. Gradients are cast to fp32 before they are
accumulated over micro-batches or reduced over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """In the `with` block, the model computes with copies of its floating-point weights in `dtype`. None: nothing is cast.

    The backward passes must be inside the `with` block too, because activation checkpointing recomputes forward during
    backward. A weight that several modules share has one copy. Buffers are not cast. An optimizer or DDP that received the
    parameters before the `with` block keeps the fp32 weights.
    """
    if dtype is None:
        yield
        return
    weight_places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None]
    copy_by_id: dict[int, torch.Tensor] = {}
    try:
        for module, name, weight in weight_places:
            if weight.is_floating_point():
                if id(weight) not in copy_by_id:
                    copy_by_id[id(weight)] = _mark_as_copy(weight.to(dtype))
                module._parameters[name] = copy_by_id[id(weight)]  # type: ignore[assignment]
        yield
    finally:
        for module, name, weight in weight_places:
            module._parameters[name] = weight


def is_weight_copy(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a copy that `cast_weights` made, or this rank's local tensor of such a copy (DTensor)."""
    return getattr(tensor, "_is_copy_of_weight", False)


def _mark_as_copy(copy: Any) -> torch.Tensor:
    copy._is_copy_of_weight = True
    if (local_copy := getattr(copy, "_local_tensor", None)) is not None:  # an operator gets the local tensor of a DTensor
        local_copy._is_copy_of_weight = True
    return copy  # type: ignore[no-any-return]
