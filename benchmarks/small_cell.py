"""The base cell of benchmarks with one process: a small GPT-2, whose steps are so short that any added work is visible."""

from __future__ import annotations

from typing import Any

import msgspec

from shardlab.matrix.cell import Cell, Instruments, Optimizer, Schedule
from trainers import menu


def cell(workload: str, n_embd: int, **keys: Any) -> Cell:
    """A cell with the strategy `single`. n_embd: the width of gpt2-tiny, ignored for other workloads. keys: the values of
    further keys of the cell."""
    options = {option.name: option.default for option in menu.workload(workload).options}
    if workload == "gpt2-tiny":
        options["n_embd"] = n_embd
    plain = Cell(
        workload=workload,
        strategy="single",
        gpus=1,
        nnodes=1,
        dp=1,
        tp=1,
        pp=1,
        servers=0,
        launcher="torchrun",
        global_batch_size=8,
        micro_batch_size=8,
        gradient_accumulation_steps=1,
        seq_len=None,
        steps=1,
        epochs=None,
        warmup_steps=0,
        precision="fp32",
        activation_checkpointing="none",
        compile=False,
        max_grad_norm=None,
        prove="off",
        optimizer=Optimizer("sgd", 0.01),
        schedule=Schedule(),
        instruments=Instruments(),
        memory_limit_gib=None,
        seed=42,
        time_limit_s=None,
        expect=[],
        options=options,
    )
    return msgspec.structs.replace(plain, **keys)
