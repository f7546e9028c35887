"""The interfaces of a workload: its entry on the menu (readable without torch), and the task that a rank trains."""

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

    parameters: number of trainable parameters, tied weights once.
    unit: the unit of throughput (tokens, images).
    flops_per_unit: floating-point operations of forward and backward of one unit at the default options, by the formula named
    in `flops_source`.
    optimizer: the default optimizer, always written into run.json.
    seq_len: the default sequence length; None if the workload has no sequences.
    heads: the name of the option with the number of attention heads, which tensor parallelism splits.
    blocks: the name of the option with the number of repeated blocks, which a pipeline divides into stages.
    heads and blocks are None if `Task.plan` does not support it.
    proof_options: options of a smaller model, for a proof if one process cannot hold the model.
    refuse: returns why the model of a cell cannot be built, as a sentence, or None. It gets the resolved cell, whose options
    are within their bounds, and needs no torch. If the sentence begins with `NAME:` or contains `(NAME)`, the error points at
    the option NAME in the matrix file.
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
    """The data of a run: its name, the SHA-256 of its bytes, and whether it is synthetic.

    classes: number of classes of labelled data, and of outputs of the model's head; None if there are no labels.
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
        """How the model is split over tensor-parallel ranks and divided into stages, if the menu says that it can be."""
        raise NotImplementedError

    def flops_per_unit(self) -> float | None:
        """Floating-point operations of forward and backward for one unit, as in `Workload.flops_per_unit`, at the sizes of this
        run; None if they are not known."""
        return None

    def validation(self) -> Task | None:
        """The same model and loss on the validation split, or None if the data has no validation split."""
        return None

    @abstractmethod
    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        """The items with these indices, (n,), on the device. May be called by another thread than the training thread. On a
        GPU, the copy is asynchronous, on the current stream."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The model's outputs for a batch, in the precision that the model computes in."""

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss (0-dim, computed in fp32) of outputs (..., classes) for targets (...): the cross-entropy."""
        from trainers.tasks.cross_entropy import cross_entropy

        return cross_entropy(outputs.flatten(0, -2), targets.flatten(), self.counted_classes)

    def correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The number of targets (...) that are the most likely class in outputs (..., classes); 0-dim, int64."""
        return (outputs[..., : self.counted_classes].argmax(-1) == targets).sum()
