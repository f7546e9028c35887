"""The instrument `memory: categories`: records the memory during one or more steps, by category and over time.

Every storage (a piece of memory of tensors) is followed; no category is computed as a difference of sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardlab.files import files
from trainers.instrument import Instrument
from trainers.instruments.memory_timeline import CATEGORIES, Timeline, timeline
from trainers.instruments.step_memory import StepMemory

if TYPE_CHECKING:
    from pathlib import Path

    from shardlab.matrix.cell import Cell, Optimizer
    from trainers.engine import Accounted
    from trainers.ranks.ranks import Peers, Ranks
    from trainers.strategy import Strategy

SCHEMA = 1
STATES = {"adam": 2, "adamw": 2, "sgd": 1}  # number of state tensors that the optimizer has for each parameter
UNKNOWN = (
    "the part of the CUDA allocator's peak that is in no category: memory that operators allocate internally, rounding to "
    "blocks, and memory from before the step that no operator of the step uses"
)


class MemoryCategories(Instrument):
    """Records the memory of consecutive steps. Each storage has the same category from its allocation to its release.

    If the engine keeps the storage (`Accounted.keeps`), the engine names the category. Otherwise the category follows from the
    use of the storage by an operator (`gathered`), or from the time of its release (`buffer`, `activation`, `temporary`).
    """

    name = "memory"

    def __init__(
        self, cell: Cell, strategy: Strategy, engine: Accounted, path: Path, steps: range, ranks: Ranks, company: Peers
    ) -> None:
        self._cell, self._strategy, self._engine = cell, strategy, engine
        self._path, self._steps, self._ranks, self._company = path, steps, ranks, company
        self._timeline: Timeline | None = None
        self._unknown_bytes = self._allocated = 0
        self._memory: StepMemory  # exists from the first to the last of `steps`

    def watches(self, step: int) -> bool:
        return step in self._steps

    def before(self, step: int) -> None:
        if step != self._steps[0]:
            self._memory.next_step()
            return
        self._memory = StepMemory(self._engine, self._ranks.device)
        self._memory.__enter__()

    def after(self, step: int) -> None:
        if self._ranks.device.type == "cuda":  # the allocator's peak is reset at the start of each step
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated(self._ranks.device))
        if step != self._steps[-1]:
            return
        memory = self._memory
        memory.__exit__(None, None, None)
        self._timeline = timeline(memory.log.changes, memory.category)
        written: dict[str, Any] = {"schema": SCHEMA, "rank": self._ranks.rank, "device": self._ranks.device.type}
        written |= {"step": self._steps[0], "steps": len(self._steps)}
        if self._ranks.device.type == "cuda":
            self._unknown_bytes = max(0, self._allocated - sum(self._timeline.peak.values()))
            written |= {"allocated": self._allocated, "unknown": self._unknown_bytes, "unknown_is": UNKNOWN}
        files.make_folder(self._path.parent)
        files.write_json(self._path, {**written, "categories": CATEGORIES, **msgspec.to_builtins(self._timeline)}, sync=False)
        del self._memory
        self._company.barrier()  # else a rank that is ready early would wait in its next step, which is timed

    def found(self) -> dict[str, Any]:
        """The results, from the rank with the highest peak. peak_bytes: bytes by category at the peak. largest_bytes: the
        maximum of each category. estimate_bytes: the estimate by formula, if there is one. A collective."""
        assert self._timeline is not None, "the step was refused or made"
        total = sum(self._timeline.peak.values())
        mine = [total, self._unknown_bytes, *self._timeline.peak.values(), *self._timeline.most.values()]
        everyone = self._company.gather(mine)
        worst = [int(value) for value in everyone[everyone[:, 0].argmax()]]
        peak, most = worst[2 : 2 + len(CATEGORIES)], worst[2 + len(CATEGORIES) :]
        found: dict[str, Any] = {"step": self._steps[0], "peak_bytes": dict(zip(CATEGORIES, peak, strict=True))}
        found["largest_bytes"] = dict(zip(CATEGORIES, most, strict=True))
        if self._ranks.device.type == "cuda":
            found["peak_bytes"]["unknown"] = worst[1]
            found["unknown_is"] = UNKNOWN
        estimated = estimate_of_cell(self._engine.parameters(), self._cell, self._strategy)
        return found if estimated is None else {**found, "estimate_bytes": estimated}


def estimate(parameters: int, precision: str, optimizer: Optimizer, *, cut: dict[str, int] | None = None) -> dict[str, int]:
    """The bytes of parameters, gradients and optimizer state on one rank, estimated by the formula of papers, not measured.

    With P parameters of w bytes, sharded over n ranks, a category has ceil(w P / n) bytes; optimizer state has this for each of
    its tensors (Rajbhandari et al., 2020, "ZeRO", section 3 and figure 1). w is 2 for bf16-pure, else 4, because with mixed
    precision weights, gradients and optimizer state stay fp32. Activations, buffers and temporary memory are not included.

    The study of GPT-2 on two H100s uses the same estimate in its section 4.2.1: its numbers (474.70, 474.70 and 949.40 MiB) are
    the bytes of 124,439,808 parameters with 4 bytes each.

    parameters: number of trainable parameters of the whole model. cut: category -> number of ranks over which
    it is sharded; a category that is missing here is not sharded.
    """
    w = 2 if precision == "bf16-pure" else 4
    states = STATES[optimizer.name] if optimizer.name != "sgd" or optimizer.momentum else 0
    whole = {"parameter": w * parameters, "gradient": w * parameters, "optimizer_state": states * w * parameters}
    return {category: -(-nbytes // (cut or {}).get(category, 1)) for category, nbytes in whole.items()}


def estimate_of_cell(parameters: int, cell: Cell, strategy: Strategy) -> dict[str, int] | None:
    """The estimate for a cell with this strategy; None if the strategy divides the model in another way than by sharding over
    data-parallel ranks."""
    if strategy.cuts is None:
        return None
    replicas = cell.options.get("replicas", 1)
    ranks = cell.dp // (replicas if isinstance(replicas, int) else 1)
    return estimate(parameters, cell.precision, cell.optimizer, cut=dict.fromkeys(strategy.cuts, ranks))
