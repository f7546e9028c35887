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
from trainers.communication import CountedCall
from trainers.rehearsal.counted_step import BytesByCategory, CountedStep

MOST_WHOLE_BLOCKS = 12  # a model with at most this many blocks per rank is rehearsed at its own depth
# blocks per rank at the smaller depth (some are neither the first nor the last), and how many more at the larger depth
LOW_DEPTH_BLOCKS, ADDED_BLOCKS = (4, 2)


def find_blocks_option(cell: Cell) -> str | None:
    """The name of the option with the number of repeated blocks; None if the workload has no such option."""
    workload = menu.find_workload_of_cell(cell)
    if workload.is_data and "n_layer" in cell.options:
        return "n_layer"
    return workload.blocks


def choose_depths(cell: Cell) -> tuple[int, int] | None:
    """The two numbers of blocks with which a cell is rehearsed; None if it is rehearsed with all its blocks.

    With both numbers, blocks are divided as in the cell: equally among the stages of a pipeline, and equally into segments or
    groups of activation checkpointing.
    """
    blocks_option = find_blocks_option(cell)
    # DeepSpeed's buckets, and the parameters that stage 3 keeps gathered, have the same size whatever the number of blocks is.
    if blocks_option is None or menu.find_strategy_of_cell(cell).engine == "trainers.engines.zero":
        return None
    block_count, stage_count = cast("int", cell.options[blocks_option]), cell.pp * cell.stages_per_rank
    _, _, group_text = cell.activation_checkpointing.partition("-")
    block_unit = math.lcm(stage_count, int(group_text or 1))
    if block_count <= MOST_WHOLE_BLOCKS * cell.pp or block_count % block_unit:
        return None
    low_depth = block_unit * -(-LOW_DEPTH_BLOCKS * cell.pp // block_unit)
    high_depth = low_depth + block_unit * -(-ADDED_BLOCKS * cell.pp // block_unit)
    return (low_depth, high_depth) if high_depth < block_count else None


def make_cell_at_depth(cell: Cell, block_count: int) -> Cell:
    """A copy of the cell whose model has `block_count` blocks."""
    blocks_option = find_blocks_option(cell)
    assert blocks_option is not None
    return msgspec.structs.replace(cell, options={**cell.options, blocks_option: block_count})


class DepthExtrapolation:
    """Extrapolates from the values at two depths to the cell's own depth, along a straight line."""

    def __init__(self, depths: tuple[int, int], cell: Cell) -> None:
        shallow_depth, deep_depth = depths
        block_count = cast("int", cell.options[find_blocks_option(cell) or ""])
        self._relative_depth = (block_count - deep_depth) / (deep_depth - shallow_depth)

    def extrapolate(self, shallow_value: float, deep_value: float) -> float:
        """The extrapolated value at the cell's own number of blocks, from the values at the two rehearsed depths."""
        return deep_value + self._relative_depth * (deep_value - shallow_value)

    def extrapolate_memory(self, shallow_memory: BytesByCategory, deep_memory: BytesByCategory) -> BytesByCategory:
        """The bytes of each category at the cell's depth, from the bytes by category at the two depths."""
        return {name: max(0, round(self.extrapolate(shallow_memory[name], deep_memory[name]))) for name in deep_memory}

    def extrapolate_step(self, shallow_step: CountedStep, deep_step: CountedStep) -> CountedStep:
        """The memory and the operations of a step at the cell's depth, with the collectives of the step `deep_step`."""
        sections = [section for section in deep_step.peaks if section in shallow_step.peaks]
        peaks = {
            section: self.extrapolate_memory(shallow_step.peaks[section], deep_step.peaks[section]) for section in sections
        }
        memory_after = self.extrapolate_memory(shallow_step.memory_after, deep_step.memory_after)
        return CountedStep(peaks, memory_after, deep_step.calls, self.extrapolate(shallow_step.flops, deep_step.flops))

    def extrapolate_collectives(
        self, shallower_calls: dict[CountedCall, float], deeper_calls: dict[CountedCall, float]
    ) -> tuple[RehearsedCollective, ...]:
        """The collectives of a step at the cell's depth, from how often each collective starts at the two depths.

        If both depths have messages of the same sizes, the number of messages is extrapolated. Otherwise a message is a bucket
        of several blocks: then the number of messages and the sum of their bytes are extrapolated, and all messages have the
        mean size.
        """
        if shallower_calls.keys() == deeper_calls.keys():
            return to_rehearsed_collectives(
                {call: self.extrapolate(shallower_calls[call], call_count) for call, call_count in deeper_calls.items()}
            )
        summed_calls: dict[CountedCall, float] = {}
        for op, group_size in {(call.op, call.ranks) for call in deeper_calls}:
            call_count, nbytes = (
                self.extrapolate(count(shallower_calls, op, group_size), count(deeper_calls, op, group_size))
                for count in (_count_calls, _sum_bytes)
            )
            if call_count > 0:
                summed_calls[CountedCall(op, round(nbytes / call_count), group_size)] = call_count
        return to_rehearsed_collectives(summed_calls)


def to_rehearsed_collectives(calls: Mapping[CountedCall, float]) -> tuple[RehearsedCollective, ...]:
    """Convert the collectives of a step to the type of the result. calls: for each collective, how often it starts."""
    sorted_calls = sorted(calls.items(), key=lambda item: (item[0].op, item[0].ranks, item[0].payload_bytes))
    return tuple(RehearsedCollective(call.op, call.payload_bytes, call.ranks, times) for call, times in sorted_calls if times)


def _count_calls(calls: dict[CountedCall, float], op: str, group_size: int) -> float:
    return float(sum(times for call, times in calls.items() if (call.op, call.ranks) == (op, group_size)))


def _sum_bytes(calls: dict[CountedCall, float], op: str, group_size: int) -> float:
    return float(sum(call.payload_bytes * times for call, times in calls.items() if (call.op, call.ranks) == (op, group_size)))
