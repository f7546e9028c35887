"""The interface between a model and tensor and pipeline parallelism: how to split its layers and divide it into stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class ModelPlan(ABC):
    """How one model is split and divided into stages.

    hidden: the shape of the hidden state of one item between two blocks; of a transformer, (positions, width).
    backward_reductions: number of all-reduces of a hidden state in the backward pass of a split block, one for each
    column-parallel layer that reads the block's input. forward_reductions: the same in the forward pass, one for each
    row-parallel layer; a transformer has one after attention and one after the MLP (Shoeybi et al., Megatron-LM, 2019,
    section 3).
    """

    hidden: tuple[int, ...]
    backward_reductions: int
    forward_reductions = 2

    @abstractmethod
    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        """Split a block's linear layers over the ranks of a 1-D mesh, in place. All ranks have the same weights before.

        sequence: hidden states that enter and leave the block have only this rank's slice of the positions. Returns the
        parameters that then see only this slice; the caller must sum their gradients over the ranks.
        """

    @abstractmethod
    def restored(self, name: str, parameter: torch.Tensor, ranks: int) -> torch.Tensor:
        """A gathered parameter of a model that is split over `ranks`, in the shape and order that it has in `Task.model`."""

    @abstractmethod
    def stage(self, model: nn.Module, index: int, count: int) -> nn.Module:
        """Stage `index` of `count`. It shares the model's modules. The first stage takes inputs, the last stage returns
        outputs; between stages goes a hidden state (items, *hidden)."""


POSITIONS = 1  # the dimension of a hidden state (items, positions, width)


def share(blocks: int, index: int, count: int) -> slice:
    """The blocks of a stage: consecutive, and in numbers as equal as possible."""
    return slice(index * blocks // count, (index + 1) * blocks // count)


def cut_between(first: nn.Module, last: nn.Module, mesh: DeviceMesh) -> None:
    """Sequence parallelism: between split layers, each rank keeps only its slice of the positions.

    A reduce-scatter and an all-gather replace each all-reduce of tensor parallelism: the same bytes, and 1/n of the memory
    (Korthikanti et al., Reducing activation recomputation, 2022). Here the hidden state that enters the first block is sliced,
    and the one that leaves the last block is gathered. A hidden state is a block's first argument and all of its output.
    """

    def enter(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = DTensor.from_local(arguments[0], mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(POSITIONS)]).to_local(), *arguments[1:])

    def leave(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        part = DTensor.from_local(output, mesh, [Shard(POSITIONS)], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()

    first.register_forward_pre_hook(enter)
    last.register_forward_hook(leave)
