"""Estimates the memory of a step without a measurement, as papers do."""

from __future__ import annotations

from shardlab.cell import Cell, Optimizer
from trainers.strategy import Strategy

STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # tensors of a parameter's size that the rule remembers


def estimate(parameters: int, precision: str, optimizer: Optimizer, *, cut: dict[str, int] | None = None) -> dict[str, int]:
    """Bytes on one rank of parameter, gradient and optimizer_state: w P each, times the tensors that the optimizer keeps.

    P: trainable parameters of the whole model. w: 4 bytes, 2 for bf16-pure: under mixed precision weights, gradients and
    optimizer stay fp32. cut: number of ranks over which each category is sharded. ceil(w P / ranks) (Rajbhandari et al., 2020,
    "ZeRO", section 3 and figure 1). It is how the study of GPT-2 on two H100s estimates in its section 4.2.1, whose figures
    (474.70, 474.70 and 949.40 MiB) are those of 124,439,808 parameters of 4 bytes. Like it, it leaves out activations,
    buffers and what is temporary.
    """
    w = 2 if precision == "bf16-pure" else 4
    states = STATES[optimizer.name] if optimizer.name != "sgd" or optimizer.momentum else 0
    whole = {"parameter": w * parameters, "gradient": w * parameters, "optimizer_state": states * w * parameters}
    return {category: -(-nbytes // (cut or {}).get(category, 1)) for category, nbytes in whole.items()}


def of_cell(parameters: int, cell: Cell, strategy: Strategy) -> dict[str, int] | None:
    """The estimate for a cell of `strategy`; None if the strategy does not only shard over data-parallel ranks."""
    if strategy.cuts is None:
        return None
    replicas = cell.options.get("replicas", 1)
    ranks = cell.dp // (replicas if isinstance(replicas, int) else 1)
    return estimate(parameters, cell.precision, cell.optimizer, cut=dict.fromkeys(strategy.cuts, ranks))
