"""The state of training as named parts of whole tensors: for each tensor, which box of it is in this rank's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from trainers import model_options


class TensorPart:
    """A box (a rectangular part) of a tensor, and this rank's memory that contains the box. Loading writes into this memory.

    memory: the elements of the box, as a tensor of the box's shape.
    shape: the shape of the whole tensor.
    offsets: the index of the box's first element in the whole tensor.
    differs_by_rank: whether each rank has a different tensor of this name, such as the state of its random numbers.

    A flat shard of a parameter is a box of the flattened parameter. The methods `size`, `__create_chunk_list__` and
    `__create_write_items__` let torch.distributed.checkpoint treat a part like a tensor.
    """

    def __init__(self, memory: torch.Tensor, shape: Iterable[int], offsets: Iterable[int], *, per_rank: bool = False) -> None:
        self.memory = memory.detach()
        self.shape, self.offsets, self.differs_by_rank = torch.Size(shape), torch.Size(offsets), per_rank

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorPart:
        """Make the TensorPart for a whole tensor, or for this rank's shard of a DTensor."""
        if isinstance(tensor, DTensor):
            (box,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            return cls(tensor.to_local(), tensor.shape, box.offsets)
        return cls(tensor, tensor.shape, [0] * tensor.dim())

    @classmethod
    def from_flat_shard(cls, memory: torch.Tensor, element_count: int, first_element: int) -> TensorPart:
        """The part for a flat shard.

        memory: the shard. element_count: number of elements of the whole tensor. first_element: index of the shard's first
        element in the
        flattened whole tensor.
        """
        return cls(memory, (element_count,), (first_element,))

    def size(self) -> torch.Size:
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.memory.shape)]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.memory)
        (box,) = self.__create_chunk_list__()
        write_data = TensorWriteData(chunk=box, properties=properties, size=self.shape)
        return [WriteItem(MetadataIndex(name, self.offsets), WriteItemType.SHARD, tensor_data=write_data)]


State = dict[str, TensorPart]


def make_parameter_parts(named_parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> State:
    """The parts of parameters and of their optimizer state. named_parameters: (name, parameter), whole or as DTensor. If this
    rank has no element of a tensor, the tensor is left out."""
    parts = {}
    for name, parameter in named_parameters:
        parts[f"parameters/{name}"] = TensorPart.from_tensor(parameter)
        for state_name, state_value in optimizer.state[parameter].items():
            if isinstance(state_value, torch.Tensor):
                parts[f"optimizer/{state_name}/{name}"] = TensorPart.from_tensor(state_value)
    return {name: part for name, part in parts.items() if part.memory.numel()}


def make_shard_parts(shards: Iterable[tuple[str, torch.Tensor, int, int]], optimizer_state: Iterable[dict[str, Any]]) -> State:
    """The parts of parameters with flat shards, and of their optimizer state, which is sharded in the same way.

    shards: for each parameter (name, memory of the shard, elements of the whole parameter, first element of the shard).
    optimizer_state: for each parameter, in the same order, the entry of the optimizer's state.
    """
    parts = {}
    for (name, memory, element_count, first_element), state in zip(shards, optimizer_state, strict=True):
        if not memory.numel():
            continue
        parts[f"parameters/{name}"] = TensorPart.from_flat_shard(memory, element_count, first_element)
        for state_name, state_value in state.items():
            if isinstance(state_value, torch.Tensor):
                is_sharded = state_value.dim() > 0
                parts[f"optimizer/{state_name}/{name}"] = (
                    TensorPart.from_flat_shard(state_value, element_count, first_element)
                    if is_sharded
                    else TensorPart.from_tensor(state_value)
                )
    return parts


def make_buffer_parts(model: nn.Module) -> State:
    """The parts of a model's persistent buffers. Each rank saves its own buffers, because BatchNorm's statistics differ between
    ranks."""
    parts = {}
    for module_path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                plain_name = model_options.plain_name(f"{module_path}.{name}" if module_path else name)
                parts[f"buffers/{plain_name}"] = TensorPart(buffer, buffer.shape, [0] * buffer.dim(), per_rank=True)
    return parts


def make_random_state_parts(device: torch.device) -> State:
    """The parts of the states of torch's random generators, as copies. After loading, call `restore_random_state`."""
    random_states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random_states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"random/{name}": TensorPart(state, state.shape, (0,), per_rank=True) for name, state in random_states.items()}


def restore_random_state(state: State, device: torch.device) -> None:
    torch.set_rng_state(state["random/cpu"].memory)
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["random/cuda"].memory, device)


def allocate_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state, by a step with zero gradients and learning rate 0, which changes no parameter.

    Without this, an optimizer has no state into which a checkpoint could be loaded before its first step.
    """
    rates_and_gradients = [(group["lr"], [p.grad for p in group["params"]]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, (learning_rate, gradients) in zip(optimizer.param_groups, rates_and_gradients):
        group["lr"] = learning_rate
        for parameter, gradient in zip(group["params"], gradients):
            parameter.grad = gradient
