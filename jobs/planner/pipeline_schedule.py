"""A discrete simulation of a pipeline's schedule: when each rank computes which micro-batch, and how long it waits.

GPipe: all forward passes, then all backward passes (Huang et al., 2019). 1F1B: as soon as it can, a rank does one backward pass
after each forward pass (Narayanan et al., PipeDream, 2019). Interleaved: 1F1B with several stages per rank (Narayanan et al.,
2021).
"""

from __future__ import annotations

import functools

import msgspec

from jobs.planner.pipeline_share import count_kept_chunks, count_round_micro_batches


class PassSlot(msgspec.Struct, frozen=True):
    """One pass of one micro-batch through one stage."""

    rank: int
    kind: str
    """F (forward) or B (backward)."""
    stage: int
    micro_batch: int
    start_time: float
    """When the pass begins, in the unit of the durations that the caller gave `simulate_pipeline`."""
    end_time: float
    """When the pass ends, in the same unit."""


class SimulatedPipeline(msgspec.Struct, frozen=True):
    """A simulated step."""

    slots: tuple[tuple[PassSlot, ...], ...]
    """The passes of each rank, in order of time."""
    total_time: float
    """The time of the step with waiting."""
    ideal_time: float
    """The time of the step without waiting."""
    micro_batch_count: int

    @property
    def bubble_share(self) -> float:
        """The share of the step in which a rank waits: 0 to 1."""
        return (self.total_time - self.ideal_time) / self.total_time

    @property
    def micro_batches_per_time(self) -> float:
        """The number of micro-batches that the pipeline completes per unit of time."""
        return self.micro_batch_count / self.total_time


def simulate_pipeline(
    schedule: str,
    rank_count: int,
    micro_batches: int,
    *,
    forward_time: float = 1.0,
    backward_time: float = 2.0,
    hop_time: float = 0.0,
    rank_stages: int = 1,
) -> SimulatedPipeline:
    """Simulate one step of a pipeline. forward_time, backward_time: the time of a pass through all stages of a rank. hop_time:
    the time of a message between two stages. rank_stages: the stages of a rank, several only if the schedule interleaves."""
    stage_forward_time, stage_backward_time = forward_time / rank_stages, backward_time / rank_stages
    stage_count = rank_count * rank_stages
    pass_orders = [_order_passes(schedule, rank, rank_count, micro_batches, rank_stages) for rank in range(rank_count)]
    end_times: dict[tuple[str, int, int], float] = {}
    rank_free_at, next_index = [0.0] * rank_count, [0] * rank_count
    rank_slots: list[list[PassSlot]] = [[] for _ in range(rank_count)]
    passes_left = sum(map(len, pass_orders))
    while passes_left:
        has_progressed = False
        for rank, pass_order in enumerate(pass_orders):
            while next_index[rank] < len(pass_order):
                kind, stage, micro_batch = pass_order[next_index[rank]]
                input_time = _find_input_time(end_times, kind, stage, micro_batch, stage_count, hop_time)
                if input_time is None:
                    break
                start_time = max(rank_free_at[rank], input_time)
                end_time = start_time + (stage_forward_time if kind == "F" else stage_backward_time)
                end_times[kind, stage, micro_batch], rank_free_at[rank] = end_time, end_time
                rank_slots[rank].append(PassSlot(rank, kind, stage, micro_batch, start_time, end_time))
                next_index[rank] += 1
                passes_left -= 1
                has_progressed = True
        assert has_progressed, f"the order of {schedule} has a cycle"
    return SimulatedPipeline(
        tuple(map(tuple, rank_slots)), max(rank_free_at), micro_batches * (forward_time + backward_time), micro_batches
    )


def _find_input_time(
    end_times: dict[tuple[str, int, int], float], kind: str, stage: int, micro_batch: int, stage_count: int, hop_time: float
) -> float | None:
    """When the input of a pass arrives; None if the input has not been computed yet. end_times: the end of each pass so far."""
    if kind == "F":
        previous_pass = ("F", stage - 1, micro_batch) if stage else None
    else:
        previous_pass = ("B", stage + 1, micro_batch) if stage < stage_count - 1 else ("F", stage, micro_batch)
    if previous_pass is None:
        return 0.0
    end_time = end_times.get(previous_pass)
    return None if end_time is None else end_time + (hop_time if previous_pass[1] != stage else 0.0)


def _order_passes(
    schedule: str, rank: int, rank_count: int, micro_batches: int, rank_stages: int
) -> list[tuple[str, int, int]]:
    """The passes of a rank in the order of the schedule, each as (F or B, number of the stage, number of the micro-batch)."""
    forward_passes = [
        (stage, micro_batch) for stage, micro_batch in _list_forward_passes(rank, rank_count, micro_batches, rank_stages)
    ]
    backward_passes = [
        (rank_count * (rank_stages - 1) + 2 * rank - stage, micro_batch) for stage, micro_batch in forward_passes
    ]
    if schedule == "gpipe":
        return [("F", *pass_indexes) for pass_indexes in forward_passes] + [
            ("B", *pass_indexes) for pass_indexes in backward_passes
        ]
    warm_up_passes = count_kept_chunks(schedule, rank, rank_count, micro_batches, rank_stages) - 1
    pass_order: list[tuple[str, int, int]] = [("F", *pass_indexes) for pass_indexes in forward_passes[:warm_up_passes]]
    for forward_pass, backward_pass in zip(forward_passes[warm_up_passes:], backward_passes):
        pass_order += [("F", *forward_pass), ("B", *backward_pass)]
    return pass_order + [("B", *pass_indexes) for pass_indexes in backward_passes[len(forward_passes) - warm_up_passes :]]


def _list_forward_passes(rank: int, rank_count: int, micro_batches: int, rank_stages: int) -> list[tuple[int, int]]:
    """The forward passes of a rank in their order, each as (number of the stage, number of the micro-batch). With several
    stages per rank, each round of micro-batches passes through the rank's first stage, then its second stage, and so on."""
    group_size = count_round_micro_batches(rank_count, micro_batches) if rank_stages > 1 else micro_batches
    micro_batch_groups = [
        range(first_micro_batch, min(first_micro_batch + group_size, micro_batches))
        for first_micro_batch in range(0, micro_batches, group_size)
    ]
    return [
        (rank + stage_index * rank_count, micro_batch)
        for micro_batch_group in micro_batch_groups
        for stage_index in range(rank_stages)
        for micro_batch in micro_batch_group
    ]


@functools.lru_cache(maxsize=4096)
def compute_bubble_ratio(schedule: str, rank_count: int, micro_batches: int, rank_stages: int) -> float:
    """The time of the bubble divided by the ideal time, if backward takes twice as long as forward and messages take no
    time."""
    pipeline = simulate_pipeline(schedule, rank_count, micro_batches, rank_stages=rank_stages)
    return (pipeline.total_time - pipeline.ideal_time) / pipeline.ideal_time


def draw_timeline(pipeline: SimulatedPipeline, character_count: int = 72) -> list[str]:
    """Draw a step as one line of text per rank. A forward pass is drawn as the last digit of its micro-batch's number, a
    backward pass as a letter (a: micro-batch 0), and waiting as a dot. character_count: the number of characters of the
    step."""
    characters_per_time = character_count / pipeline.total_time
    rank_lines = []
    for rank, rank_slots in enumerate(pipeline.slots):
        characters = ["."] * character_count
        for pass_slot in rank_slots:
            character = str(pass_slot.micro_batch % 10) if pass_slot.kind == "F" else chr(ord("a") + pass_slot.micro_batch % 26)
            for column in range(
                round(pass_slot.start_time * characters_per_time),
                max(round(pass_slot.start_time * characters_per_time) + 1, round(pass_slot.end_time * characters_per_time)),
            ):
                if column < character_count:
                    characters[column] = character
        rank_lines.append(f"rank {rank:>2} {''.join(characters)}")
    return rank_lines
