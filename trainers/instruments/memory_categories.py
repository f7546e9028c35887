"""Memory during one step, by category and over time. Every storage is followed; nothing is estimated from sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardlab import files
from trainers.instrument import Instrument
from trainers.instruments.memory_timeline import CATEGORIES, Timeline, timeline
from trainers.instruments.step_memory import StepMemory

if TYPE_CHECKING:
    from pathlib import Path

    from shardlab.cell import Cell, Optimizer
    from trainers.engine import Accounted
    from trainers.ranks import Peers, Ranks
    from trainers.strategy import Strategy

SCHEMA = 1
STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # tensors of a parameter's size that the optimizer keeps
UNKNOWN = (
    "the part of the CUDA allocator's peak that is in no category: memory that operators allocate internally, rounding to "
    "blocks, and memory from before the step that no operator of the step uses"
)


class MemoryCategories(Instrument):
    """The instrument `memory: categories`."""

    name = "memory"

    def __init__(
        self, cell: Cell, strategy: Strategy, engine: Accounted, path: Path, step: int, ranks: Ranks, company: Peers
    ) -> None:
        self._cell, self._strategy, self._engine = cell, strategy, engine
        self._path, self._step, self._ranks, self._company = path, step, ranks, company
        self._timeline: Timeline | None = None
        self._unknown_bytes = 0

    def watches(self, step: int) -> bool:
        return step == self._step

    def before(self, step: int) -> None:
        self._memory = StepMemory(self._engine, self._ranks.device)
        self._memory.__enter__()

    def after(self, step: int) -> None:
        memory = self._memory
        memory.__exit__(None, None, None)
        self._timeline = timeline(memory.log.changes, memory.category)
        written: dict[str, Any] = {"schema": SCHEMA, "rank": self._ranks.rank, "step": step, "device": self._ranks.device.type}
        if self._ranks.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._ranks.device)  # since the step began
            self._unknown_bytes = max(0, allocated - sum(self._timeline.peak.values()))
            written |= {"allocated": allocated, "unknown": self._unknown_bytes, "unknown_is": UNKNOWN}
        files.make_folder(self._path.parent)
        files.write_json(self._path, {**written, "categories": CATEGORIES, **msgspec.to_builtins(self._timeline)}, sync=False)
        del self._memory
        self._company.barrier()  # else a rank that ends early would wait in its next step, which is timed

    def found(self) -> dict[str, Any]:
        """Bytes by category on the rank with the highest peak: at the peak, the maximum of each category, and the estimate."""
        assert self._timeline is not None, "the step was refused or made"
        total = sum(self._timeline.peak.values())
        mine = [total, self._unknown_bytes, *self._timeline.peak.values(), *self._timeline.most.values()]
        everyone = self._company.gather(mine)
        worst = [int(value) for value in everyone[everyone[:, 0].argmax()]]
        peak, most = worst[2 : 2 + len(CATEGORIES)], worst[2 + len(CATEGORIES) :]
        found: dict[str, Any] = {"step": self._step, "peak_bytes": dict(zip(CATEGORIES, peak, strict=True))}
        found["largest_bytes"] = dict(zip(CATEGORIES, most, strict=True))
        if self._ranks.device.type == "cuda":
            found["peak_bytes"]["unknown"] = worst[1]
            found["unknown_is"] = UNKNOWN
        estimated = estimate_of_cell(self._engine.parameters(), self._cell, self._strategy)
        return found if estimated is None else {**found, "estimate_bytes": estimated}


def estimate(parameters: int, precision: str, optimizer: Optimizer, *, cut: dict[str, int] | None = None) -> dict[str, int]:
    """The estimate of papers, without a measurement: bytes on one rank of parameter, gradient and optimizer_state. w P each,
    times the tensors that the optimizer keeps.

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


def estimate_of_cell(parameters: int, cell: Cell, strategy: Strategy) -> dict[str, int] | None:
    """The estimate for a cell of `strategy`; None if the strategy does not only shard over data-parallel ranks."""
    if strategy.cuts is None:
        return None
    replicas = cell.options.get("replicas", 1)
    ranks = cell.dp // (replicas if isinstance(replicas, int) else 1)
    return estimate(parameters, cell.precision, cell.optimizer, cut=dict.fromkeys(strategy.cuts, ranks))
