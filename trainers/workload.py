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
    import numpy as np
    import torch
    from torch import nn

    from trainers.plans.plan import Plan


class Workload(msgspec.Struct, frozen=True):
    """A variant on the menu.

    parameters: trainable, tied weights once. unit: what is counted (tokens, images). flops_per_unit: forward and backward of
    one unit at the default options, by the formula named in `flops_source`. seq_len: the default, None where the
    workload has no sequences. optimizer: the default, always written into run.json. heads: the option that counts
    attention heads, which tensor parallelism deals out, and blocks: the one that counts repeated blocks, which a pipeline
    deals out; None where `Task.plan` has no such cut. proof_options: options that make a model small enough to be held
    against one process, where it is not. refuse: why the model of a cell cannot be built, as a sentence, or None; it sees the
    resolved cell, whose options are within their bounds, and needs no torch. `NAME: ...` or `... (NAME) ...` in the sentence
    places it at that option of the matrix file.
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
    heads: str | None = None
    blocks: str | None = None
    proof_options: dict[str, int] = {}
    refuse: Callable[[Cell], str | None] = lambda _: None


class Batch(msgspec.Struct):
    """Inputs and targets of one micro-batch, on the device."""

    inputs: torch.Tensor
    targets: torch.Tensor


class DataSource(msgspec.Struct, frozen=True):
    """What a run was fed: its name, the SHA-256 of the bytes, and whether it stands in for a real set.

    classes: of labelled data, which is how many outputs the model's head has; None where there are no labels.
    """

    name: str
    sha256: str
    synthetic: bool
    items: int
    classes: int | None = None


class Task(ABC):
    """Model, data and loss of one run on one rank.

    units_per_item: units of data in one item (tokens in a sequence). padding: number of padding parameters, which are
    not counted as parameters of the model. counted_classes: number of real classes, if outputs are padded; None if not.
    """

    source: DataSource
    units_per_item: int
    padding: int = 0
    counted_classes: int | None = None

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; equal on every rank when torch's generator has the same seed."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks in order, for wrapping, sharding and checkpointing."""

    def plan(self) -> Plan:
        """How the model is cut over tensor-parallel ranks and into stages, where the menu says that it can be."""
        raise NotImplementedError

    def flops_per_unit(self) -> float | None:
        """Floating-point operations of forward and backward for one unit, as `Workload.flops_per_unit` counts them, at the
        sizes that this run really has; None where they are not known."""
        return None

    def validation(self) -> Task | None:
        """The same model and loss over the validation split, or None where the data has none."""
        return None

    @abstractmethod
    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        """The items with these indices, (n,), on the device. Another thread than the one that trains may call it; on a GPU
        the copy is ordered before whatever the current stream is given next."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The model's outputs for a batch, in the precision that the model computes in."""

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss (0-dim, computed in fp32) of outputs (..., classes) for targets (...): the cross-entropy."""
        from trainers.tasks.cross_entropy import cross_entropy

        return cross_entropy(outputs.flatten(0, -2), targets.flatten(), self.counted_classes)

    def correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How many of the targets (...) are the likeliest class in outputs (..., classes), 0-dim in int64."""
        return (outputs[..., : self.counted_classes].argmax(-1) == targets).sum()
