"""What a strategy says of itself (readable without torch) and what it makes of a model (its engine)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shardlab.cell import Cell
from shardlab.registry import Option

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.instruments.timing import Clock
    from trainers.ranks import Ranks
    from trainers.workload import Batch, Task


class Strategy(msgspec.Struct, frozen=True):
    """A variant on the menu.

    precisions: those that it honours. options: its knobs. refuse: why a cell cannot be had, as a sentence, or None;
    it sees the resolved cell and needs no torch. build: makes the engine on a rank; imports torch itself.
    """

    name: str
    summary: str
    precisions: tuple[str, ...]
    refuse: Callable[[Cell], str | None]
    build: Callable[[Cell, Task, Ranks], Engine]
    options: tuple[Option, ...] = ()


class Engine(ABC):
    """A model spread over ranks, and how one optimizer step is made with it. The loop knows nothing else.

    `effective` says which of the asked knobs took effect, as they stand in the wrapped model and not as they were asked.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    effective: dict[str, Any]

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        """Accumulate the gradients of one step and return this rank's mean loss (0-dim, detached, on the device)."""

    @abstractmethod
    def update(self) -> None:
        """Apply the gradients and clear them."""
