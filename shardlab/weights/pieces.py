"""Finds the part of each parameter of a model that this rank holds, whatever library shards the model.

A piece is a block of the whole parameter: the same element has the same place in the whole parameter for each strategy, so
checksums of pieces can be added over ranks. No rank sends anything. Supported are plain models, DDP, FSDP1, FSDP2 (and other
DTensors), and ZeRO of DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

# Classes that hold the model of the user in an attribute, which becomes a part of the names of parameters.
WRAPPERS = {
    "DistributedDataParallel": "module", "DataParallel": "module", "DeepSpeedEngine": "module", "OptimizedModule": "_orig_mod",
}  # fmt: skip
# Parts of names that wrappers inside of the model add.
WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_flat_param")


class ParameterPiece(NamedTuple):
    """A block of a parameter. A tensor is None if this rank holds no element of the parameter."""

    name: str
    """The name of the parameter in the model of the user."""
    weight: Any
    """The elements that this rank holds, as a tensor with `len(shape)` dimensions."""
    gradient: Any
    """Their gradient; None if the library no longer has it."""
    shape: tuple[int, ...]
    """The shape of the whole parameter; (number of elements,) if the block is contiguous in memory."""
    offsets: tuple[int, ...]
    """The place of the first element in the whole parameter."""


class UnseenParameter(NamedTuple):
    """A parameter whose pieces cannot be found."""

    name: str
    reason: str


def list_pieces(model: Any) -> Iterator[ParameterPiece | UnseenParameter]:
    """Yields the pieces of all parameters of a model that this rank holds."""
    while (wrapped_attribute := WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, wrapped_attribute)
    seen_ids = set()
    for module_name, module in model.named_modules():
        flat_parameter = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat_parameter is not None:
            seen_ids |= {id(flat_parameter), *map(id, flat_parameter._params or ())}
            yield from _split_flat_parameter(f"{module_name}." if module_name else "", flat_parameter)
    for name, parameter in model.named_parameters():
        if id(parameter) in seen_ids:
            continue
        if hasattr(parameter, "ds_tensor"):
            yield from _cut_zero_parameter(_strip_wrapper_names(name), parameter)
        elif hasattr(parameter, "placements"):
            yield _localize_dtensor(_strip_wrapper_names(name), parameter)
        else:
            gradient = None if parameter.grad is None else parameter.grad.flatten()
            yield ParameterPiece(_strip_wrapper_names(name), parameter.detach().flatten(), gradient, (parameter.numel(),), (0,))


def _strip_wrapper_names(name: str) -> str:
    for wrapper_part in WRAPPER_PARTS:
        name = name.replace(wrapper_part, "")
    return name


def _split_flat_parameter(module_prefix: str, flat_parameter: Any) -> Iterator[ParameterPiece]:
    """The pieces in this rank's shard of a flat parameter of FSDP1. module_prefix: the name of the module that has the
    parameter."""
    local_shard = getattr(
        flat_parameter, "_local_shard", flat_parameter.data
    ).detach()  # it has no _local_shard before the first step
    flat_gradient = flat_parameter.grad
    for index, shard_info in enumerate(flat_parameter._shard_param_infos):
        if not shard_info.in_shard:
            continue
        shard_slice = slice(shard_info.offset_in_shard, shard_info.offset_in_shard + shard_info.numel_in_shard)
        gradient = flat_parameter._params[index].grad if flat_parameter._params is not None else flat_gradient
        if gradient is not None:
            gradient = gradient.flatten()
            gradient = gradient[shard_slice] if gradient.numel() == local_shard.numel() else gradient
        if gradient is not None and gradient.numel() != shard_info.numel_in_shard:
            gradient = None
        name = _strip_wrapper_names(module_prefix + flat_parameter._fqns[index])
        element_count = math.prod(flat_parameter._shapes[index])
        yield ParameterPiece(name, local_shard[shard_slice], gradient, (element_count,), (shard_info.intra_param_start_idx,))


def _cut_zero_parameter(name: str, parameter: Any) -> Iterator[ParameterPiece]:
    """The piece of a parameter of ZeRO stage 3. The last ranks may hold only padding."""
    rank_partition = parameter.ds_tensor.detach().flatten()
    first_element = parameter.ds_process_group.rank() * rank_partition.numel()
    held_elements = min(rank_partition.numel(), parameter.ds_numel - first_element)
    if held_elements > 0:
        yield ParameterPiece(name, rank_partition[:held_elements], None, (parameter.ds_numel,), (first_element,))


def _localize_dtensor(name: str, parameter: Any) -> ParameterPiece | UnseenParameter:
    """The piece of a parameter that is a DTensor. Only blocks are supported: a strided shard is none."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(placement) not in (Shard, Replicate) for placement in parameter.placements):
        return UnseenParameter(name, f"its placement is {parameter.placements}"[:200])
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    weight = parameter.detach().to_local()
    gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else None
    if not parameter.shape:  # a single number
        return ParameterPiece(name, weight.view(1), None if gradient is None else gradient.view(1), (1,), (0,))
    return ParameterPiece(name, weight, gradient, tuple(parameter.shape), tuple(offsets))
