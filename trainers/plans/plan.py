"""What tensor and pipeline parallelism have to know of a model, so that they need to know no model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class Plan(ABC):
    """The cuts of one model.

    hidden: (positions, width) of one item between two blocks. backward_reductions: all-reduces of that size in a split
    block's backward pass, one for each column-parallel layer that reads the block's input; forward has
    `FORWARD_REDUCTIONS`, one behind attention and one behind the MLP (Shoeybi et al., Megatron-LM, 2019, section 3).
    """

    hidden: tuple[int, int]
    backward_reductions: int

    @abstractmethod
    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        """Cut a block's linear layers over the ranks of a 1-D mesh, in place; every rank comes with the same weights.

        sequence: hidden states that enter and leave it have a slice of the positions. Given are the parameters whose
        gradient is then a sum over the ranks that is still to be made: those that only see this rank's positions.
        """

    @abstractmethod
    def restored(self, name: str, parameter: torch.Tensor, ranks: int) -> torch.Tensor:
        """A gathered parameter of a model split over `ranks`, as `Task.model` has the one of this name: shape and order."""

    @abstractmethod
    def stage(self, model: nn.Module, index: int, count: int) -> nn.Module:
        """Stage `index` of `count`, sharing the model's modules: the first takes inputs, the last gives outputs, and
        between stages goes a hidden state, (items, *hidden)."""


FORWARD_REDUCTIONS = 2


def share(blocks: int, index: int, count: int) -> slice:
    """The blocks of a stage: in order, and as equally many as can be."""
    return slice(index * blocks // count, (index + 1) * blocks // count)
