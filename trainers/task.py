"""The interface of a task: the model, its blocks (the units of sharding and checkpointing), the data and the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trainers.cross_entropy import compute_cross_entropy, count_correct_predictions

if TYPE_CHECKING:
    from trainers.data.data_sets import DataSource
    from trainers.plans.plan import ModelPlan


class Batch(msgspec.Struct):
    """Inputs and targets of one micro-batch, on the device. The first dimension of both tensors is the item."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Task(ABC):
    """Model, data and loss of one run on one rank."""

    source: DataSource
    """The data set."""
    units_per_item: int
    """Units of throughput in one item: the tokens of a sequence, or 1 for an image."""
    padding: int = 0
    """Number of padding parameters, which are not counted as parameters of the model."""
    counted_classes: int | None = None
    """Number of real classes, if the outputs have additional, padded classes; else None."""
    classes_group: dist.ProcessGroup | None = None
    """The ranks that have a slice of the classes of each output, in order; None: this rank has all classes."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Its weights are the same on every rank if torch's random generator has the same state."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks of a model in order. Sharding, activation checkpointing and compilation work block by block."""

    def plan(self) -> ModelPlan:
        """How the model is split over tensor-parallel ranks and divided into pipeline stages. Only for workloads for which the
        menu allows this; others raise NotImplementedError."""
        raise NotImplementedError

    def flops_per_unit(self) -> float | None:
        """Floating-point operations of forward and backward for one unit, as in `Workload.flops_per_unit`, at the sizes of this
        run; None if they are not known."""
        return None

    def open_validation(self) -> Task | None:
        """The same model and loss on the validation split, or None if the data has no validation split."""
        return None

    @abstractmethod
    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        """The items with these indices, (n,), on the device. May be called by another thread than the training thread. On a
        GPU, the copy is asynchronous, on the current stream."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The model's outputs for a batch, in the dtype in which the model computes."""

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss (0-dim, computed in fp32) of outputs (..., classes) for targets (...): the cross-entropy."""
        return compute_cross_entropy(outputs.flatten(0, -2), targets.flatten(), self.counted_classes, self.classes_group)

    def correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The number of right predictions: targets (...) that are the class with the largest output in outputs (..., classes).
        0-dim, int64."""
        return count_correct_predictions(outputs, targets, self.counted_classes, self.classes_group)
