"""A discrete simulation of a pipeline's schedule: when each rank computes which micro-batch, and how long it waits.

GPipe: all forward passes, then all backward passes (Huang et al., 2019). 1F1B: as soon as it can, a rank does one backward pass
after each forward pass (Narayanan et al., PipeDream, 2019). Interleaved: 1F1B with several stages per rank (Narayanan et al.,
2021).
"""

from __future__ import annotations

import functools

import msgspec

from jobs.planner.pipeline_share import kept_chunks


class PassSlot(msgspec.Struct, frozen=True):
    """One pass of one micro-batch through one stage. start, end: in the unit of the times that `simulate` got. kind: F
    (forward) or B (backward)."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


class SimulatedPipeline(msgspec.Struct, frozen=True):
    """A simulated step. slots: the passes of each rank, in order of time. total, ideal: the time of the step with and without
    waiting."""

    slots: tuple[tuple[PassSlot, ...], ...]
    total: float
    ideal: float
    micro_batches: int

    @property
    def bubble(self) -> float:
        """The share of the step in which a rank waits: 0 to 1."""
        return (self.total - self.ideal) / self.total

    @property
    def throughput(self) -> float:
        """The number of micro-batches that the pipeline completes per unit of time."""
        return self.micro_batches / self.total


def simulate(
    schedule: str,
    ranks: int,
    micro_batches: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    hop: float = 0.0,
    per_rank: int = 1,
) -> SimulatedPipeline:
    """Simulate one step of a pipeline. forward, backward: the time of a pass through all stages of a rank. hop: the time of a
    message between two stages. per_rank: the number of stages per rank, above 1 only for the interleaved schedule."""
    f, b, stages = forward / per_rank, backward / per_rank, ranks * per_rank
    orders = [_order(schedule, rank, ranks, micro_batches, per_rank) for rank in range(ranks)]
    done: dict[tuple[str, int, int], float] = {}
    free, next_of = [0.0] * ranks, [0] * ranks
    slots: list[list[PassSlot]] = [[] for _ in range(ranks)]
    left = sum(map(len, orders))
    while left:
        moved = False
        for rank, order in enumerate(orders):
            while next_of[rank] < len(order):
                kind, stage, micro = order[next_of[rank]]
                ready = _ready(done, kind, stage, micro, stages, hop)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = start + (f if kind == "F" else b)
                done[kind, stage, micro], free[rank] = end, end
                slots[rank].append(PassSlot(rank, kind, stage, micro, start, end))
                next_of[rank] += 1
                left -= 1
                moved = True
        assert moved, f"the order of {schedule} has a cycle"
    return SimulatedPipeline(tuple(map(tuple, slots)), max(free), micro_batches * (forward + backward), micro_batches)


def _ready(done: dict[tuple[str, int, int], float], kind: str, stage: int, micro: int, stages: int, hop: float) -> float | None:
    """When the input of a pass arrives; None if the input has not been computed yet. done: the end of each pass so far."""
    if kind == "F":
        before = ("F", stage - 1, micro) if stage else None
    else:
        before = ("B", stage + 1, micro) if stage < stages - 1 else ("F", stage, micro)
    if before is None:
        return 0.0
    end = done.get(before)
    return None if end is None else end + (hop if before[1] != stage else 0.0)


def _order(schedule: str, rank: int, ranks: int, micro_batches: int, per_rank: int) -> list[tuple[str, int, int]]:
    """The passes of a rank in the order of the schedule, each as (F or B, number of the stage, number of the micro-batch)."""
    forwards = [(stage, micro) for stage, micro in _rounds(rank, ranks, micro_batches, per_rank)]
    backwards = [(ranks * (per_rank - 1) + 2 * rank - stage, micro) for stage, micro in forwards]
    if schedule == "gpipe":
        return [("F", *one) for one in forwards] + [("B", *one) for one in backwards]
    warm = kept_chunks(schedule, rank, ranks, micro_batches, per_rank) - 1
    order: list[tuple[str, int, int]] = [("F", *one) for one in forwards[:warm]]
    for forward, backward in zip(forwards[warm:], backwards):
        order += [("F", *forward), ("B", *backward)]
    return order + [("B", *one) for one in backwards[len(forwards) - warm :]]


def _rounds(rank: int, ranks: int, micro_batches: int, per_rank: int) -> list[tuple[int, int]]:
    """The forward passes of a rank in their order, each as (number of the stage, number of the micro-batch). With several
    stages per rank, each group of `ranks` micro-batches passes through the rank's first stage, then its second stage, and so
    on."""
    size = ranks if per_rank > 1 else micro_batches
    groups = [range(begin, min(begin + size, micro_batches)) for begin in range(0, micro_batches, size)]
    return [(rank + chunk * ranks, micro) for group in groups for chunk in range(per_rank) for micro in group]


@functools.lru_cache(maxsize=4096)
def bubble_over_ideal(schedule: str, ranks: int, micro_batches: int, per_rank: int) -> float:
    """The time of the bubble divided by the ideal time, if backward takes twice as long as forward and messages take no
    time."""
    found = simulate(schedule, ranks, micro_batches, per_rank=per_rank)
    return (found.total - found.ideal) / found.ideal


def drawn(step: SimulatedPipeline, width: int = 72) -> list[str]:
    """Draw a step as one line of text per rank. A forward pass is drawn as the last digit of its micro-batch's number, a
    backward pass as a letter (a: micro-batch 0), and waiting as a dot. width: the number of characters of the step."""
    scale = width / step.total
    lines = []
    for rank, slots in enumerate(step.slots):
        cells = ["."] * width
        for slot in slots:
            sign = str(slot.micro_batch % 10) if slot.kind == "F" else chr(ord("a") + slot.micro_batch % 26)
            for place in range(round(slot.start * scale), max(round(slot.start * scale) + 1, round(slot.end * scale))):
                if place < width:
                    cells[place] = sign
        lines.append(f"rank {rank:>2} {''.join(cells)}")
    return lines
