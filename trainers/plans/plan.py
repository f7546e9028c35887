"""The interface between a model and tensor and pipeline parallelism: how to split its layers and divide it into stages."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class Plan(ABC):
    """How one model is split and divided into stages.

    hidden: (positions, width) of the hidden state of one item between two blocks. backward_reductions: number of all-reduces of
    a hidden state in the backward pass of a split block, one for each column-parallel layer that reads the block's input.
    Forward has `FORWARD_REDUCTIONS`, one after attention and one after the MLP (Shoeybi et al., Megatron-LM, 2019, section 3).
    """

    hidden: tuple[int, int]
    backward_reductions: int

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


FORWARD_REDUCTIONS = 2


def share(blocks: int, index: int, count: int) -> slice:
    """The blocks of a stage: consecutive, and in numbers as equal as possible."""
    return slice(index * blocks // count, (index + 1) * blocks // count)
