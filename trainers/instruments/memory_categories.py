"""The instrument `memory: categories`: records the memory during one or more steps, by category and over time.

Every storage (a piece of memory of tensors) is followed; no category is computed as a difference of sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardlab.files import files
from trainers.instrument import Instrument
from trainers.instruments.memory_timeline import CATEGORIES, Timeline, compute_timeline
from trainers.instruments.step_memory import StepMemory

if TYPE_CHECKING:
    from pathlib import Path

    from shardlab.matrix.cell import Cell, Optimizer
    from trainers.engine import Accountable
    from trainers.ranks.ranks import Peers, Ranks
    from trainers.strategy import Strategy

SCHEMA = 1
UNKNOWN_REMARK = (
    "the part of the CUDA allocator's peak that is in no category: memory that operators allocate internally, rounding to "
    "blocks, and memory from before the step that no operator of the step uses"
)


class MemoryCategories(Instrument):
    """Records the memory of consecutive steps. Each storage has the same category from its allocation to its release.

    If the engine keeps the storage (`Accountable.list_tensors_by_category`), the engine names the category. Otherwise the
    category follows from the use of the storage by an operator (`gathered`), or from the time of its release (`buffer`,
    `activation`, `temporary`)."""

    name = "memory"

    def __init__(
        self, cell: Cell, strategy: Strategy, engine: Accountable, path: Path, steps: range, ranks: Ranks, peers: Peers
    ) -> None:
        self._cell, self._strategy, self._engine = cell, strategy, engine
        self._path, self._memory_steps, self._ranks, self._peers = path, steps, ranks, peers
        self._timeline: Timeline | None = None
        self._unknown_bytes = self._allocated_bytes = 0
        self._step_memory: StepMemory  # exists from the first to the last of `steps`

    def watches_step(self, step: int) -> bool:
        return step in self._memory_steps

    def before_step(self, step: int) -> None:
        if step != self._memory_steps[0]:
            self._step_memory.begin_next_step()
            return
        self._step_memory = StepMemory(self._engine, self._ranks.device)
        self._step_memory.__enter__()

    def after_step(self, step: int) -> None:
        if self._ranks.device.type == "cuda":  # the allocator's peak is reset at the start of each step
            self._allocated_bytes = max(self._allocated_bytes, torch.cuda.max_memory_allocated(self._ranks.device))
        if step != self._memory_steps[-1]:
            return
        step_memory = self._step_memory
        step_memory.__exit__(None, None, None)
        self._timeline = compute_timeline(step_memory.log.changes, step_memory.find_category)
        content: dict[str, Any] = {"schema": SCHEMA, "rank": self._ranks.rank, "device": self._ranks.device.type}
        content |= {"step": self._memory_steps[0], "steps": len(self._memory_steps)}
        if self._ranks.device.type == "cuda":
            self._unknown_bytes = max(0, self._allocated_bytes - sum(self._timeline.peak.values()))
            content |= {"allocated": self._allocated_bytes, "unknown": self._unknown_bytes, "unknown_is": UNKNOWN_REMARK}
        files.make_folder(self._path.parent)
        files.write_json(self._path, {**content, "categories": CATEGORIES, **msgspec.to_builtins(self._timeline)}, sync=False)
        del self._step_memory
        self._peers.barrier()  # else a rank that is ready early would wait in its next step, which is timed

    def collect_results(self) -> dict[str, Any]:
        """The results, from the rank with the highest peak. peak_bytes: bytes by category at the peak. largest_bytes: the
        maximum of each category. estimate_bytes: the estimate by formula, if there is one. A collective."""
        assert self._timeline is not None, "the step was refused or made"
        peak_total = sum(self._timeline.peak.values())
        rank_numbers = [peak_total, self._unknown_bytes, *self._timeline.peak.values(), *self._timeline.most.values()]
        numbers_by_rank = self._peers.all_gather_numbers(rank_numbers)
        highest_row = [int(value) for value in numbers_by_rank[numbers_by_rank[:, 0].argmax()]]
        peak_bytes, largest_bytes = highest_row[2 : 2 + len(CATEGORIES)], highest_row[2 + len(CATEGORIES) :]
        results: dict[str, Any] = {"step": self._memory_steps[0], "peak_bytes": dict(zip(CATEGORIES, peak_bytes, strict=True))}
        results["largest_bytes"] = dict(zip(CATEGORIES, largest_bytes, strict=True))
        if self._ranks.device.type == "cuda":
            results["peak_bytes"]["unknown"] = highest_row[1]
            results["unknown_is"] = UNKNOWN_REMARK
        estimate_bytes = estimate_cell_memory(self._engine.count_parameters(), self._cell, self._strategy)
        return results if estimate_bytes is None else {**results, "estimate_bytes": estimate_bytes}


def estimate_memory(
    parameter_count: int, precision: str, optimizer: Optimizer, *, ranks_by_category: dict[str, int] | None = None
) -> dict[str, int]:
    """The bytes of parameters, gradients and optimizer state on one rank, estimated by the formula of papers, not measured.

    With P parameters of w bytes, sharded over n ranks, a category has ceil(w P / n) bytes; optimizer state has this for each of
    its tensors (Rajbhandari et al., 2020, "ZeRO", section 3 and figure 1). w is 2 for bf16-pure, else 4, because with mixed
    precision weights, gradients and optimizer state stay fp32. Activations, buffers and temporary memory are not included.

    The study of GPT-2 on two H100s uses the same estimate in its section 4.2.1: its numbers (474.70, 474.70 and 949.40 MiB) are
    the bytes of 124,439,808 parameters with 4 bytes each.

    parameter_count: number of trainable parameters of the whole model. ranks_by_category: category -> number of ranks over
    which
    it is sharded; a category that is missing here is not sharded.
    """
    element_bytes = 2 if precision == "bf16-pure" else 4
    unsharded_bytes = {
        "parameter": element_bytes * parameter_count,
        "gradient": element_bytes * parameter_count,
        "optimizer_state": optimizer.state_tensor_count * element_bytes * parameter_count,
    }
    return {category: -(-nbytes // (ranks_by_category or {}).get(category, 1)) for category, nbytes in unsharded_bytes.items()}


def estimate_cell_memory(parameter_count: int, cell: Cell, strategy: Strategy) -> dict[str, int] | None:
    """The estimate for a cell with this strategy; None if the strategy divides the model in another way than by sharding over
    data-parallel ranks."""
    if strategy.cuts is None:
        return None
    ranks_by_category = dict.fromkeys(strategy.cuts, cell.shards)
    return estimate_memory(parameter_count, cell.precision, cell.optimizer, ranks_by_category=ranks_by_category)
