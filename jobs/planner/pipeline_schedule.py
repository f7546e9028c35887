"""A discrete simulation of a pipeline's schedule: when each rank computes which micro-batch, and how long it waits.

GPipe: all forward passes, then all backward passes (Huang et al., 2019). 1F1B: as soon as it can, a rank does one backward pass
after each forward pass (Narayanan et al., PipeDream, 2019). Interleaved: 1F1B with several stages per rank (Narayanan et al.,
2021).
"""

from __future__ import annotations

import functools

import msgspec

from jobs.planner.pipeline_share import count_kept_chunks, micro_batches_per_round


class PassSlot(msgspec.Struct, frozen=True):
    """One pass of one micro-batch through one stage."""

    rank: int
    kind: str
    """F (forward) or B (backward)."""
    stage: int
    micro_batch: int
    start: float
    """When the pass begins, in the unit of the durations that the caller gave `simulate_pipeline`."""
    end: float
    """When the pass ends, in the same unit."""


class SimulatedPipeline(msgspec.Struct, frozen=True):
    """A simulated step."""

    slots: tuple[tuple[PassSlot, ...], ...]
    """The passes of each rank, in order of time."""
    total: float
    """The time of the step with waiting."""
    ideal: float
    """The time of the step without waiting."""
    micro_batches: int

    @property
    def bubble(self) -> float:
        """The share of the step in which a rank waits: 0 to 1."""
        return (self.total - self.ideal) / self.total

    @property
    def throughput(self) -> float:
        """The number of micro-batches that the pipeline completes per unit of time."""
        return self.micro_batches / self.total


def simulate_pipeline(
    schedule: str,
    rank_count: int,
    micro_batches: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    hop_time: float = 0.0,
    per_rank: int = 1,
) -> SimulatedPipeline:
    """Simulate one step of a pipeline. forward, backward: the time of a pass through all stages of a rank. hop_time: the time
    of a message between two stages. per_rank: the number of stages per rank, above 1 only for the interleaved schedule."""
    forward_time, backward_time, stages = forward / per_rank, backward / per_rank, rank_count * per_rank
    orders = [_order_passes(schedule, rank, rank_count, micro_batches, per_rank) for rank in range(rank_count)]
    end_times: dict[tuple[str, int, int], float] = {}
    rank_free_at, next_index = [0.0] * rank_count, [0] * rank_count
    slots: list[list[PassSlot]] = [[] for _ in range(rank_count)]
    passes_left = sum(map(len, orders))
    while passes_left:
        has_progressed = False
        for rank, order in enumerate(orders):
            while next_index[rank] < len(order):
                kind, stage, micro = order[next_index[rank]]
                ready = _input_time(end_times, kind, stage, micro, stages, hop_time)
                if ready is None:
                    break
                start = max(rank_free_at[rank], ready)
                end = start + (forward_time if kind == "F" else backward_time)
                end_times[kind, stage, micro], rank_free_at[rank] = end, end
                slots[rank].append(PassSlot(rank, kind, stage, micro, start, end))
                next_index[rank] += 1
                passes_left -= 1
                has_progressed = True
        assert has_progressed, f"the order of {schedule} has a cycle"
    return SimulatedPipeline(tuple(map(tuple, slots)), max(rank_free_at), micro_batches * (forward + backward), micro_batches)


def _input_time(
    end_times: dict[tuple[str, int, int], float], kind: str, stage: int, micro: int, stages: int, hop_time: float
) -> float | None:
    """When the input of a pass arrives; None if the input has not been computed yet. end_times: the end of each pass so far."""
    if kind == "F":
        previous_pass = ("F", stage - 1, micro) if stage else None
    else:
        previous_pass = ("B", stage + 1, micro) if stage < stages - 1 else ("F", stage, micro)
    if previous_pass is None:
        return 0.0
    end = end_times.get(previous_pass)
    return None if end is None else end + (hop_time if previous_pass[1] != stage else 0.0)


def _order_passes(schedule: str, rank: int, rank_count: int, micro_batches: int, per_rank: int) -> list[tuple[str, int, int]]:
    """The passes of a rank in the order of the schedule, each as (F or B, number of the stage, number of the micro-batch)."""
    forwards = [(stage, micro) for stage, micro in _list_forward_passes(rank, rank_count, micro_batches, per_rank)]
    backwards = [(rank_count * (per_rank - 1) + 2 * rank - stage, micro) for stage, micro in forwards]
    if schedule == "gpipe":
        return [("F", *indexes) for indexes in forwards] + [("B", *indexes) for indexes in backwards]
    warm_up_passes = count_kept_chunks(schedule, rank, rank_count, micro_batches, per_rank) - 1
    order: list[tuple[str, int, int]] = [("F", *indexes) for indexes in forwards[:warm_up_passes]]
    for forward, backward in zip(forwards[warm_up_passes:], backwards):
        order += [("F", *forward), ("B", *backward)]
    return order + [("B", *indexes) for indexes in backwards[len(forwards) - warm_up_passes :]]


def _list_forward_passes(rank: int, rank_count: int, micro_batches: int, per_rank: int) -> list[tuple[int, int]]:
    """The forward passes of a rank in their order, each as (number of the stage, number of the micro-batch). With several
    stages per rank, each round of micro-batches passes through the rank's first stage, then its second stage, and so on."""
    size = micro_batches_per_round(rank_count, micro_batches) if per_rank > 1 else micro_batches
    groups = [range(begin, min(begin + size, micro_batches)) for begin in range(0, micro_batches, size)]
    return [(rank + chunk * rank_count, micro) for group in groups for chunk in range(per_rank) for micro in group]


@functools.lru_cache(maxsize=4096)
def bubble_over_ideal(schedule: str, rank_count: int, micro_batches: int, per_rank: int) -> float:
    """The time of the bubble divided by the ideal time, if backward takes twice as long as forward and messages take no
    time."""
    simulated = simulate_pipeline(schedule, rank_count, micro_batches, per_rank=per_rank)
    return (simulated.total - simulated.ideal) / simulated.ideal


def draw_timeline(step: SimulatedPipeline, width: int = 72) -> list[str]:
    """Draw a step as one line of text per rank. A forward pass is drawn as the last digit of its micro-batch's number, a
    backward pass as a letter (a: micro-batch 0), and waiting as a dot. width: the number of characters of the step."""
    scale = width / step.total
    lines = []
    for rank, slots in enumerate(step.slots):
        characters = ["."] * width
        for slot in slots:
            character = str(slot.micro_batch % 10) if slot.kind == "F" else chr(ord("a") + slot.micro_batch % 26)
            for column in range(round(slot.start * scale), max(round(slot.start * scale) + 1, round(slot.end * scale))):
                if column < width:
                    characters[column] = character
        lines.append(f"rank {rank:>2} {''.join(characters)}")
    return lines
