"""Makes the optimizer of a cell and computes the learning rate of each step. They are the same for every strategy.

A further optimizer also needs its name and its count of state tensors in shardlab/matrix/cell.py, and the time of its update in
jobs/planner/step_time.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from shardlab.matrix.cell import Optimizer, Schedule


def make_optimizer(settings: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the torch optimizer that a cell asks for. parameters: whole parameters or shards."""
    match settings.name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
        case "adam":
            optimizer_class: type[torch.optim.Adam | torch.optim.AdamW] = torch.optim.Adam
        case "adamw":
            optimizer_class = torch.optim.AdamW
    betas = settings.beta1, settings.beta2
    return optimizer_class(
        parameters,
        lr=settings.lr,
        betas=betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=settings.fused or None,
    )


def compute_learning_rate(settings: Optimizer, schedule: Schedule, step: int, step_count: int, data_ranks: int) -> float:
    """The learning rate of a step.

    With linear scaling (`lr_scaling`), the full rate is `data_ranks` times the rate of the optimizer (Goyal et al., 2017).
    The rate rises linearly and reaches the full rate at step `lr_warmup_steps`. After this step it stays constant, or falls
    (linearly, or as a cosine) such that it would be 0 at the step after the last one.

    settings: the optimizer of the cell. step: 0, 1, ..., steps - 1. step_count: number of all steps, including the untimed
    warm-up
    steps. data_ranks: number of slices of the global batch.
    """
    warmup_steps = schedule.lr_warmup_steps
    full_rate = settings.lr * (data_ranks if schedule.lr_scaling == "linear" else 1)
    if step < warmup_steps:
        return full_rate * (step + 1) / (warmup_steps + 1)
    decay_progress = (step - warmup_steps) / max(1, step_count - warmup_steps)
    if schedule.name == "cosine":
        return full_rate * 0.5 * (1 + math.cos(math.pi * decay_progress))
    return full_rate * (1 - decay_progress) if schedule.name == "linear" else full_rate


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
