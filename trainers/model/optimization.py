"""The optimizer and the learning rate of each step. They are the same for every strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from shardlab.matrix.cell import Optimizer, Schedule


def make(rule: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the torch optimizer that a cell asks for. parameters: whole parameters or shards."""
    if rule.name == "sgd":
        return torch.optim.SGD(parameters, lr=rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay)
    kind = torch.optim.Adam if rule.name == "adam" else torch.optim.AdamW
    betas = rule.beta1, rule.beta2
    return kind(parameters, lr=rule.lr, betas=betas, eps=rule.eps, weight_decay=rule.weight_decay, fused=rule.fused or None)


def learning_rate(rule: Optimizer, schedule: Schedule, step: int, steps: int, data_ranks: int) -> float:
    """The learning rate of a step.

    With linear scaling (`lr_scaling`), the full rate is `data_ranks` times the rate of the optimizer (Goyal et al., 2017).
    The rate rises linearly and reaches the full rate at step `lr_warmup_steps`. After this step it stays constant, or falls
    (linearly, or as a cosine) such that it would be 0 at the step after the last one.

    rule: the optimizer of the cell. step: 0, 1, ..., steps - 1. steps: number of all steps, including the untimed warm-up
    steps. data_ranks: number of slices of the global batch.
    """
    rise = schedule.lr_warmup_steps
    full = rule.lr * (data_ranks if schedule.lr_scaling == "linear" else 1)
    if step < rise:
        return full * (step + 1) / (rise + 1)
    passed = (step - rise) / max(1, steps - rise)
    if schedule.name == "cosine":
        return full * 0.5 * (1 + math.cos(math.pi * passed))
    return full * (1 - passed) if schedule.name == "linear" else full


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
