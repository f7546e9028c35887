"""BatchNorm with fixed statistics, so that the result does not depend on how a batch is divided over ranks.

In training, BatchNorm normalises by the statistics of the items that one rank has in one pass (Ioffe and Szegedy, 2015). So a
run on several ranks computes, by design, other values than one process. The same-work proof removes this difference.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from trainers.task import Task


def freeze_statistics(task: Task, indices: np.ndarray, device: torch.device) -> Task:
    """A copy of the task whose models have BatchNorm layers with fixed statistics: the statistics of the items `indices`, (n,).

    All ranks get the same statistics. The initial statistics (mean 0, variance 1) cannot be used, because with them deep
    networks overflow.
    """

    def build_frozen_model() -> nn.Module:
        network = task.model()
        _freeze_batch_norms(network, task, indices, device)
        return network

    frozen_task = copy.copy(task)
    frozen_task.model = build_frozen_model  # type: ignore[method-assign]
    return frozen_task


def list_batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers of a model."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _freeze_batch_norms(model: nn.Module, task: Task, indices: np.ndarray, device: torch.device) -> None:
    batch_norms = list_batch_norm_layers(model)
    if not batch_norms:
        return
    if not next(model.parameters()).is_meta:  # the statistics of a meta model are broadcast with its weights (deferred_init)
        momenta = [module.momentum for module in batch_norms]
        for module in batch_norms:
            module.momentum = 1.0  # type: ignore[assignment]
        with torch.no_grad():
            task.outputs(model.to(device), task.fetch(indices, device))
        for module, momentum in zip(batch_norms, momenta, strict=True):
            module.momentum = momentum
    for module in batch_norms:
        module.eval()
