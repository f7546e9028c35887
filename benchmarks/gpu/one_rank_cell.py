"""Makes a cell with one rank, for the checks of stages C and D."""

from __future__ import annotations

from typing import Any

import msgspec

from shardlab.cell import Cell, Instruments, Optimizer, Schedule
from trainers import menu


def small(*, workload: str = "gpt2-tiny", strategy: str = "single", options: dict[str, Any] | None = None, **keys: Any) -> Cell:
    """A cell of one rank with these keys and the menu's defaults."""
    of_workload = menu.workload(workload)
    defaults = {option.name: option.default for option in (*of_workload.options, *menu.strategy(strategy).options)}
    plain = Cell(
        workload=workload, strategy=strategy, gpus=1, nnodes=1, dp=1, tp=1, pp=1, servers=0, launcher="torchrun",
        global_batch_size=8, micro_batch_size=8, gradient_accumulation_steps=1, seq_len=of_workload.seq_len, steps=1,
        epochs=None, warmup_steps=0, precision="fp32", activation_checkpointing="none", compile=False, max_grad_norm=None,
        prove="off", optimizer=Optimizer("adamw", 1e-3), schedule=Schedule(), instruments=Instruments(),
        memory_limit_gib=None, seed=42,
        time_limit_s=None, expect=[], options={**defaults, **(options or {})},
    )  # fmt: skip
    return msgspec.structs.replace(plain, **keys)
