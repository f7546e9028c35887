"""What a workload says of itself (readable without torch) and the task that a rank makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardlab.cell import Cell, Optimizer
from shardlab.registry import Option

if TYPE_CHECKING:
    import torch
    from torch import nn


class Workload(msgspec.Struct, frozen=True):
    """A variant on the menu.

    parameters: trainable, tied weights once. unit: what is counted (tokens, images). flops_per_unit: forward and backward of
    one unit at the default options, by the formula named in `flops_source`. seq_len: the default, None where the
    workload has no sequences. optimizer: the default, always written into run.json.
    """

    name: str
    summary: str
    parameters: int
    unit: str
    flops_per_unit: float
    flops_source: str
    optimizer: Optimizer
    build: Callable[[Cell, Path], Task]
    seq_len: int | None = None
    options: tuple[Option, ...] = ()


class Batch(msgspec.Struct):
    """Inputs and targets of one micro-batch on the device, and the units of data in it."""

    inputs: torch.Tensor
    targets: torch.Tensor
    units: int


class DataSource(msgspec.Struct, frozen=True):
    """What a run was fed: its name, the SHA-256 of the bytes, and whether it stands in for a real set."""

    name: str
    sha256: str
    synthetic: bool
    items: int


class Task(ABC):
    """Model, data and loss of one run on one rank."""

    source: DataSource

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; equal on every rank when torch's generator has the same seed."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks in order, for wrapping, sharding and checkpointing."""

    @abstractmethod
    def fetch(self, indices: Sequence[int], device: torch.device) -> Batch:
        """The items with these indices, on the device."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss over the batch (0-dim)."""
