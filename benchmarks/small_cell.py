"""The base cell of benchmarks with one process: a small GPT-2, whose steps are so short that any added work is visible."""

from __future__ import annotations

from typing import Any

import msgspec

from shardlab.matrix.cell import Cell, Optimizer
from trainers import menu


def cell(workload: str, n_embd: int, **keys: Any) -> Cell:
    """A cell with the strategy `single`. n_embd: the width of gpt2-tiny, ignored for other workloads. keys: the values of
    further keys of the cell."""
    options = {option.name: option.default for option in menu.find_workload(workload).options}
    if workload == "gpt2-tiny":
        options["n_embd"] = n_embd
    plain = Cell(
        workload=workload, strategy="single", gpus=1, dp=1, global_batch_size=8, micro_batch_size=8, steps=1, prove="off",
        optimizer=Optimizer("sgd", 0.01), options=options,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **keys)
