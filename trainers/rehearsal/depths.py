"""Rehearses a deep model with two smaller numbers of blocks, and extrapolates to its own depth the values that grow linearly
with the number of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.runs.rehearsed import RehearsedCollective
from trainers import menu
from trainers.communication import Call
from trainers.rehearsal.counted_step import CountedStep, Memory

MOST_WHOLE_BLOCKS = 12  # a model with at most this many blocks per rank is rehearsed at its own depth
LOW_DEPTH_BLOCKS, ADDED_BLOCKS = (
    4,
    2,
)  # blocks per rank at the smaller depth (some are neither the first nor the last), and how many more at the larger depth


def blocks_option(cell: Cell) -> str | None:
    """The name of the option with the number of repeated blocks; None if the workload has no such option."""
    workload = menu.workload_of(cell)
    if workload.is_data and "n_layer" in cell.options:
        return "n_layer"
    return workload.blocks


def choose_depths(cell: Cell) -> tuple[int, int] | None:
    """The two numbers of blocks with which a cell is rehearsed; None if it is rehearsed with all its blocks.

    With both numbers, blocks are divided as in the cell: equally among the stages of a pipeline, and equally into segments or
    groups of activation checkpointing.
    """
    name = blocks_option(cell)
    # DeepSpeed's buckets, and the parameters that stage 3 keeps gathered, have the same size whatever the number of blocks is.
    if name is None or menu.strategy_of(cell).engine == "trainers.engines.zero":
        return None
    blocks, stages = cast("int", cell.options[name]), cell.pp * cell.stages_per_rank
    _, _, group = cell.activation_checkpointing.partition("-")
    block_unit = math.lcm(stages, int(group or 1))
    if blocks <= MOST_WHOLE_BLOCKS * cell.pp or blocks % block_unit:
        return None
    low = block_unit * -(-LOW_DEPTH_BLOCKS * cell.pp // block_unit)
    high = low + block_unit * -(-ADDED_BLOCKS * cell.pp // block_unit)
    return (low, high) if high < blocks else None


def cell_at_depth(cell: Cell, blocks: int) -> Cell:
    """A copy of the cell whose model has `blocks` blocks."""
    name = blocks_option(cell)
    assert name is not None
    return msgspec.structs.replace(cell, options={**cell.options, name: blocks})


class DepthLine:
    """Extrapolates from the values at two depths to the cell's own depth, along a straight line."""

    def __init__(self, depths: tuple[int, int], cell: Cell) -> None:
        low, high = depths
        blocks = cast("int", cell.options[blocks_option(cell) or ""])
        self._relative_depth = (blocks - high) / (high - low)

    def extrapolate(self, low: float, high: float) -> float:
        """The extrapolated value at the cell's own number of blocks. low, high: the values at the two rehearsed depths."""
        return high + self._relative_depth * (high - low)

    def extrapolate_memory(self, low: Memory, high: Memory) -> Memory:
        """The bytes of each category at the cell's depth. low, high: the bytes by category at the two depths."""
        return {name: max(0, round(self.extrapolate(low[name], high[name]))) for name in high}

    def extrapolate_step(self, low: CountedStep, high: CountedStep) -> CountedStep:
        """The memory and the operations of a step at the cell's depth, with the collectives of the step `high`."""
        sections = [section for section in high.peaks if section in low.peaks]
        peaks = {section: self.extrapolate_memory(low.peaks[section], high.peaks[section]) for section in sections}
        memory = self.extrapolate_memory(low.memory_after, high.memory_after)
        return CountedStep(peaks, memory, high.calls, self.extrapolate(low.flops, high.flops))

    def extrapolate_collectives(self, low: dict[Call, int], high: dict[Call, int]) -> tuple[RehearsedCollective, ...]:
        """The collectives of a step at the cell's depth. low, high: for each collective, how often it starts at the two depths.

        If both depths have messages of the same sizes, the number of messages is extrapolated. Otherwise a message is a bucket
        of several blocks: then the number of messages and the sum of their bytes are extrapolated, and all messages have the
        mean size.
        """
        if low.keys() == high.keys():
            return to_rehearsed_collectives({call: self.extrapolate(low[call], times) for call, times in high.items()})
        summed: dict[Call, float] = {}
        for op, ranks in {(call.op, call.ranks) for call in high}:
            times, nbytes = (
                self.extrapolate(count(low, op, ranks), count(high, op, ranks)) for count in (_count_calls, _sum_bytes)
            )
            if times > 0:
                summed[Call(op, round(nbytes / times), ranks)] = times
        return to_rehearsed_collectives(summed)


def to_rehearsed_collectives(calls: Mapping[Call, float]) -> tuple[RehearsedCollective, ...]:
    """Convert the collectives of a step to the type of the result. calls: for each collective, how often it starts."""
    ordered = sorted(calls.items(), key=lambda item: (item[0].op, item[0].ranks, item[0].payload_bytes))
    return tuple(RehearsedCollective(call.op, call.payload_bytes, call.ranks, times) for call, times in ordered if times)


def _count_calls(calls: dict[Call, int], op: str, ranks: int) -> float:
    return float(sum(times for call, times in calls.items() if (call.op, call.ranks) == (op, ranks)))


def _sum_bytes(calls: dict[Call, int], op: str, ranks: int) -> float:
    return float(sum(call.payload_bytes * times for call, times in calls.items() if (call.op, call.ranks) == (op, ranks)))
