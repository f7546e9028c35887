"""The timed steps in which the instruments `memory` and `profile` measure, and why a run cannot have an instrument or a fault.
Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.matrix.cell import Cell

FIRST_MEMORY_STEP = 2  # the first step is not typical, because the optimizer allocates its state in it


def choose_memory_step(cell: Cell) -> int:
    """The step whose memory is recorded: the first step from FIRST_MEMORY_STEP on that is not profiled."""
    profile = cell.instruments.profile
    if profile is not None and profile.first_step <= FIRST_MEMORY_STEP < profile.first_step + profile.steps:
        return profile.first_step + profile.steps
    return FIRST_MEMORY_STEP


def choose_memory_steps(cell: Cell) -> range:
    """The steps whose memory is recorded: one step, or `memory_steps` consecutive steps with `memory: categories`."""
    first_step, instruments = choose_memory_step(cell), cell.instruments
    return range(first_step, first_step + (instruments.memory_steps if instruments.memory == "categories" else 1))


def list_refusals(cell: Cell, timed_steps: int | None, *, cuda: bool | None = None) -> Iterator[tuple[str, str]]:
    """Yields (cell key, reason) for each instrument of a cell that its run cannot have.

    timed_steps: number of timed steps; None if it depends on the data. cuda: whether ranks have GPUs; None if this is not
    known yet.
    """
    yield from _list_fault_refusals(cell, timed_steps)
    profile, memory = cell.instruments.profile, cell.instruments.memory
    if profile is not None:
        last_profiled = profile.first_step + profile.steps - 1
        if timed_steps is not None and last_profiled > timed_steps:
            profiled_window = f"steps {profile.first_step} to {last_profiled}" if profile.steps > 1 else f"step {last_profiled}"
            yield (
                "instruments.profile",
                f"found {profiled_window}, but the last timed step is {timed_steps}. Allowed: 1 to {timed_steps}.",
            )
        if not profile.ranks or max(profile.ranks) >= cell.gpus:
            yield "instruments.profile", f"ranks: found {profile.ranks}. Allowed: one or more of 0 to {cell.gpus - 1}."
    if memory != "categories" and cell.instruments.memory_steps > 1:
        yield "instruments.memory_steps", f"found {cell.instruments.memory_steps} with memory: {memory}. Allowed: 1."
    if memory == "peak":
        return
    if timed_steps is not None and (step := choose_memory_step(cell)) > timed_steps:
        reason_for_step = ", the first that is not profiled" if step != FIRST_MEMORY_STEP else ""
        yield (
            "instruments.memory",
            f"{memory} needs timed step {step}{reason_for_step}: found steps: {timed_steps}. Allowed: more steps.",
        )
    recorded_steps = choose_memory_steps(cell)
    if len(recorded_steps) > 1 and timed_steps is not None and recorded_steps[-1] > timed_steps >= recorded_steps[0]:
        found_text = f"found steps {recorded_steps[0]} to {recorded_steps[-1]}, but the last timed step is {timed_steps}."
        yield "instruments.memory_steps", f"{found_text} Allowed: 1 to {timed_steps - recorded_steps[0] + 1}."
    if profile is not None and recorded_steps[0] < profile.first_step <= recorded_steps[-1]:
        found_text = f"found steps {recorded_steps[0]} to {recorded_steps[-1]}, but step {profile.first_step} is profiled."
        yield "instruments.memory_steps", f"{found_text} Allowed: 1 to {profile.first_step - recorded_steps[0]}."
    if memory == "categories" and cell.compile:
        yield "instruments.memory", "categories needs to see every operator, and compiled blocks hide them. Allowed: peak."
    if memory == "snapshot" and (cell.launcher == "fork" or cuda is False):
        yield (
            "instruments.memory",
            "snapshot records the CUDA allocator, and ranks on a CPU have none. Allowed: peak, categories.",
        )


def _list_fault_refusals(cell: Cell, timed_steps: int | None) -> Iterator[tuple[str, str]]:
    slowed_rank, lost_rank = cell.instruments.straggler, cell.instruments.lost_worker
    for key, fault in (("straggler", slowed_rank), ("lost_worker", lost_rank)):
        if fault is not None and fault.rank >= cell.gpus:
            yield f"instruments.{key}", f"rank: found {fault.rank}. Allowed: 0 to {cell.gpus - 1}, the ranks that train."
    if lost_rank is not None and timed_steps is not None and lost_rank.step > timed_steps:
        allowed = f"Allowed: 2 to {timed_steps}." if timed_steps > 1 else "Allowed: a run of two steps or more."
        yield "instruments.lost_worker", f"step: found {lost_rank.step}, but the last timed step is {timed_steps}. {allowed}"
