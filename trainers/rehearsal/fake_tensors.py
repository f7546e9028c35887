"""The context in which engines run on tensors that have shapes but no memory. What it uses of torch's private parts stays here.

torch's FakeTensorMode alone runs no engine, for three reasons. Meshes and process groups compute with small integer tensors
whose values they need. Engines read a few numbers from tensors, such as the sign that a gradient overflowed. And nn.Module.to
refuses fake parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")  # where the storages of fake tensors are, whatever device the tensors say


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """New tensors are fake in the `with` block. Real tensors that are computed with each other stay real."""
    apply = nn.Module._apply
    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _RealNumbers():  # type: ignore[no-untyped-call]
            yield mode
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


def alive() -> list[FakeTensor]:
    """All fake tensors that exist and would have memory."""
    gc.collect()  # tensors in cycles would be freed at some later moment
    return [found for found in gc.get_objects() if issubclass(type(found), FakeTensor) and found.device.type != "meta"]


real_tensors = unset_fake_temporarily
"""A context in which new tensors are real again, inside `fake_tensors`."""


class _RealNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes with real tensors as usual, and gives a zero where a number is read from a fake tensor."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor and its like unfold first
        named = kwargs or {}
        if operator is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _number(args[0].dtype)
        tensors = [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return operator(*args, **named)
        return operator(*args, **named)


class RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New tensors of integers are real in this context, inside `fake_tensors`."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        dtype = named.get("dtype")
        if not types and dtype is not None and not dtype.is_floating_point:
            with unset_fake_temporarily():
                return operator(*args, **named)
        return operator(*args, **named)


def _number(dtype: torch.dtype) -> float | int | bool:
    """What a rehearsal reads from a fake tensor: a zero, so that no gradient has overflowed."""
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """nn.Module._apply, which changes the data of fake parameters instead of swapping them (torch 2.13 fails at this, because
    a fake tensor is referred to weakly by its mode)."""
    for child in module.children() if recurse else ():
        child._apply(fn)  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            applied = fn(parameter)
            if applied.device == parameter.device:
                parameter.data = applied
            else:
                module._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module
