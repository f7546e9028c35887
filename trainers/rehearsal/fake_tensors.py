"""A context in which engines run on fake tensors, which have shapes but no memory. Only this module uses the private parts of
torch that are needed for this.

torch's FakeTensorMode alone is not enough, for three reasons. Meshes and process groups compute with small integer tensors
whose values they need. Engines read a few numbers from tensors, such as the flag that a gradient overflowed. And nn.Module.to
refuses fake parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.model.counted_flops import ExpertProducts

DEVICE = torch.device("meta")  # the device of the storages of fake tensors, whatever device the tensors report


@contextmanager
def use_fake_tensors() -> Iterator[FakeTensorMode]:
    """In the `with` block, new tensors are fake. Operations whose inputs are all real give real tensors."""
    original_apply = nn.Module._apply
    nn.Module._apply = _apply_to_fake  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _RealNumbers():  # type: ignore[no-untyped-call]
            yield mode
    finally:
        nn.Module._apply = original_apply  # type: ignore[method-assign]


def list_live_fake_tensors() -> list[FakeTensor]:
    """All fake tensors that still exist. If they were real tensors, they would occupy memory."""
    gc.collect()  # otherwise, unused tensors in reference cycles would still exist
    return [value for value in gc.get_objects() if issubclass(type(value), FakeTensor) and value.device.type != "meta"]


use_real_tensors = unset_fake_temporarily
"""A context for use inside `fake_tensors`: in it, new tensors are real."""

C = TypeVar("C", bound=Callable[..., Any])


def with_real_tensors(function: C) -> C:
    """The same function, but the tensors that it makes are real, also if it is called inside `fake_tensors`."""

    @wraps(function)
    def call_with_real_tensors(*arguments: Any, **options: Any) -> Any:
        with use_real_tensors():
            return function(*arguments, **options)

    return call_with_real_tensors  # type: ignore[return-value]


def make_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replace the real tensors of a model by fake tensors, and return the model. A model has real tensors if they were made
    before it, such as a table of weights that a user's file makes when it is imported."""
    for module in model.modules():
        tensor_dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors_by_name in tensor_dicts:
            tensors_by_name |= {
                name: mode.from_tensor(tensor) for name, tensor in tensors_by_name.items() if tensor is not None
            }
    return model


class _RealNumbers(ExpertProducts):  # type: ignore[no-untyped-call]
    """A context in which reading a number from a fake tensor gives zero. Real tensors are computed as usual."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # then DTensor and similar classes call operators on their inner tensors
        keyword_arguments = kwargs or {}
        if operator is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _make_zero(args[0].dtype)
        tensors = [leaf for leaf in pytree.tree_leaves((args, keyword_arguments)) if isinstance(leaf, torch.Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return operator(*args, **keyword_arguments)
        return super().__torch_dispatch__(operator, types, args, keyword_arguments)


class RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context inside `fake_tensors` in which new tensors of integers are real."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keyword_arguments = kwargs or {}
        dtype = keyword_arguments.get("dtype")
        if not types and dtype is not None and not dtype.is_floating_point:
            with unset_fake_temporarily():
                return operator(*args, **keyword_arguments)
        return operator(*args, **keyword_arguments)


def _make_zero(dtype: torch.dtype) -> float | int | bool:
    """The number that is read from a fake tensor: zero, so that the overflow flag says that no gradient has overflowed."""
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _apply_to_fake(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Replaces nn.Module._apply. It changes the data of fake parameters instead of swapping the parameters: torch 2.13 cannot
    swap them, because FakeTensorMode has weak references to fake tensors."""
    for child in module.children() if recurse else ():
        child._apply(fn)  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            applied_parameter = fn(parameter)
            if applied_parameter.device == parameter.device:
                parameter.data = applied_parameter
            else:
                module._parameters[name] = nn.Parameter(applied_parameter, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module
