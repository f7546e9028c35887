"""The timed steps in which the instruments `memory` and `profile` measure, and why a run cannot have an instrument or a fault.
Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.matrix.cell import Cell

MEMORY_FROM = 2  # the first step is not typical, because the optimizer allocates its state in it


def memory_step(cell: Cell) -> int:
    """The step whose memory is recorded: the first step from MEMORY_FROM on that is not profiled."""
    profile = cell.instruments.profile
    if profile is not None and profile.first_step <= MEMORY_FROM < profile.first_step + profile.steps:
        return profile.first_step + profile.steps
    return MEMORY_FROM


def memory_steps(cell: Cell) -> range:
    """The steps whose memory is recorded: one step, or `memory_steps` consecutive steps with `memory: categories`."""
    first, instruments = memory_step(cell), cell.instruments
    return range(first, first + (instruments.memory_steps if instruments.memory == "categories" else 1))


def refusals(cell: Cell, steps: int | None, *, cuda: bool | None = None) -> Iterator[tuple[str, str]]:
    """Yields (cell key, reason) for each instrument of a cell that its run cannot have.

    steps: number of timed steps; None if it depends on the data. cuda: whether ranks have GPUs; None if this is not known yet.
    """
    yield from _fault_refusals(cell, steps)
    profile, memory = cell.instruments.profile, cell.instruments.memory
    if profile is not None:
        last = profile.first_step + profile.steps - 1
        if steps is not None and last > steps:
            window = f"steps {profile.first_step} to {last}" if profile.steps > 1 else f"step {last}"
            yield "instruments.profile", f"found {window}, but the last timed step is {steps}. Allowed: 1 to {steps}."
        if not profile.ranks or max(profile.ranks) >= cell.gpus:
            yield "instruments.profile", f"ranks: found {profile.ranks}. Allowed: one or more of 0 to {cell.gpus - 1}."
    if memory != "categories" and cell.instruments.memory_steps > 1:
        yield "instruments.memory_steps", f"found {cell.instruments.memory_steps} with memory: {memory}. Allowed: 1."
    if memory == "peak":
        return
    if steps is not None and (step := memory_step(cell)) > steps:
        after = ", the first that is not profiled" if step != MEMORY_FROM else ""
        yield "instruments.memory", f"{memory} needs timed step {step}{after}: found steps: {steps}. Allowed: more steps."
    recorded_steps = memory_steps(cell)
    if len(recorded_steps) > 1 and steps is not None and recorded_steps[-1] > steps >= recorded_steps[0]:
        why = f"found steps {recorded_steps[0]} to {recorded_steps[-1]}, but the last timed step is {steps}."
        yield "instruments.memory_steps", f"{why} Allowed: 1 to {steps - recorded_steps[0] + 1}."
    if profile is not None and recorded_steps[0] < profile.first_step <= recorded_steps[-1]:
        why = f"found steps {recorded_steps[0]} to {recorded_steps[-1]}, but step {profile.first_step} is profiled."
        yield "instruments.memory_steps", f"{why} Allowed: 1 to {profile.first_step - recorded_steps[0]}."
    if memory == "categories" and cell.compile:
        yield "instruments.memory", "categories needs to see every operator, and compiled blocks hide them. Allowed: peak."
    if memory == "snapshot" and (cell.launcher == "fork" or cuda is False):
        yield (
            "instruments.memory",
            "snapshot records the CUDA allocator, and ranks on a CPU have none. Allowed: peak, categories.",
        )


def _fault_refusals(cell: Cell, steps: int | None) -> Iterator[tuple[str, str]]:
    slowed_rank, lost_rank = cell.instruments.straggler, cell.instruments.lost_worker
    for key, fault in (("straggler", slowed_rank), ("lost_worker", lost_rank)):
        if fault is not None and fault.rank >= cell.gpus:
            yield f"instruments.{key}", f"rank: found {fault.rank}. Allowed: 0 to {cell.gpus - 1}, the ranks that train."
    if lost_rank is not None and steps is not None and lost_rank.step > steps:
        allowed = f"Allowed: 2 to {steps}." if steps > 1 else "Allowed: a run of two steps or more."
        yield "instruments.lost_worker", f"step: found {lost_rank.step}, but the last timed step is {steps}. {allowed}"
