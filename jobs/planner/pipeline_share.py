"""What a rank of a pipeline holds: how many blocks, and the activations of how many micro-batches at the same time.

With GPipe, a rank keeps the activations of all m micro-batches (Huang et al., 2019, section 2.3). With 1F1B, rank r of p ranks
keeps the activations of at most p - r micro-batches (Narayanan et al., Memory-efficient pipeline-parallel DNN training, 2021).
In the interleaved schedule with v stages per rank, rank r computes 2(p - r - 1) + (v - 1)p forward passes of a stage and then
alternates forward and backward (Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021, section
2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from jobs.planner.model_facts import ModelFacts
from jobs.planner.sharding import find_strategy
from shardlab.matrix.cell import Cell


class StageShare(msgspec.Struct, frozen=True):
    """A rank's part of the model."""

    block_numbers: Sequence[int]
    """The numbers of its blocks, in the order of forward."""
    has_first_stage: bool
    """Whether the rank has the first stage."""
    has_last_stage: bool
    """Whether the rank has the last stage."""
    kept_micro_batches: float
    """The largest number of micro-batches for which the rank keeps the activations of all its blocks; may be a fraction if the
    rank has several stages."""

    @property
    def block_count(self) -> int:
        """The number of its blocks."""
        return len(self.block_numbers)


def read_schedule_name(cell: Cell) -> str:
    """The schedule of a cell's pipeline: gpipe, 1f1b or interleaved. Meshes with a pipeline use 1f1b."""
    return cast("str", find_strategy(cell.strategy).settings.get("schedule", "1f1b"))


def count_kept_chunks(schedule: str, rank: int, rank_count: int, micro_batches: int, rank_stages: int = 1) -> int:
    """The largest number of (micro-batch, stage) pairs whose activations a rank keeps at the same time."""
    if schedule == "gpipe":
        return micro_batches * rank_stages
    if schedule == "interleaved":
        round_micro_batches = count_round_micro_batches(rank_count, micro_batches)
        return min(micro_batches * rank_stages, 2 * (rank_count - rank - 1) + (rank_stages - 1) * round_micro_batches + 1)
    return min(micro_batches, rank_count - rank)


def count_round_micro_batches(rank_count: int, micro_batches: int) -> int:
    """How many micro-batches a rank passes through one of its stages before the next stage in the interleaved schedule of
    torch, which divides the micro-batches into rounds of at least one per rank."""
    return micro_batches // max(1, micro_batches // rank_count)


def compute_shares(cell: Cell, facts: ModelFacts) -> list[StageShare]:
    """The parts of the model on the ranks of a pipeline that can need most memory: the first, the last, and the rank between
    them that keeps the activations of most blocks. Without a pipeline, the whole model."""
    if cell.pp == 1:
        return [StageShare(range(facts.block_count), True, True, 1.0)]
    rank_stages, schedule = cell.stages_per_rank, read_schedule_name(cell)
    stage_count = cell.pp * rank_stages
    stage_shares = []
    for rank in range(cell.pp):
        # Each stage has consecutive blocks, in numbers as equal as possible. Stage s is on rank s mod pp.
        block_numbers = [
            block_number
            for stage in range(rank, stage_count, cell.pp)
            for block_number in range(stage * facts.block_count // stage_count, (stage + 1) * facts.block_count // stage_count)
        ]
        kept_micro_batches = (
            count_kept_chunks(schedule, rank, cell.pp, cell.gradient_accumulation_steps, rank_stages) / rank_stages
        )
        stage_shares.append(StageShare(block_numbers, rank == 0, rank == cell.pp - 1, kept_micro_batches))
    middle_share = max(
        stage_shares[1:-1], key=lambda share: share.block_count * share.kept_micro_batches, default=stage_shares[0]
    )
    return [stage_shares[0], stage_shares[-1], middle_share]
