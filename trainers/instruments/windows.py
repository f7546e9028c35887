"""Which timed steps instruments look into, and why a cell has none for them to look into; without torch."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.cell import Cell

MEMORY_FROM = 2  # the first step makes the optimizer's state


def memory_step(cell: Cell) -> int:
    """The step whose memory is looked into: the first from MEMORY_FROM on that the profiler leaves alone."""
    profile = cell.instruments.profile
    if profile is not None and profile.first_step <= MEMORY_FROM < profile.first_step + profile.steps:
        return profile.first_step + profile.steps
    return MEMORY_FROM


def refusals(cell: Cell, steps: int | None, *, cuda: bool | None = None) -> Iterator[tuple[str, str]]:
    """(cell key, why) for each instrument that a run of so many timed steps cannot have.

    steps: None where only the data will tell. cuda: whether ranks have GPUs, None where only they will tell.
    """
    profile, memory = cell.instruments.profile, cell.instruments.memory
    if profile is not None:
        last = profile.first_step + profile.steps - 1
        if steps is not None and last > steps:
            window = f"steps {profile.first_step} to {last}" if profile.steps > 1 else f"step {last}"
            yield "instruments.profile", f"{window} asked for, of a run of {steps}. Allowed: timed steps 1 to {steps}."
        if not profile.ranks or max(profile.ranks) >= cell.gpus:
            yield "instruments.profile", f"ranks: found {profile.ranks}. Allowed: one or more of 0 to {cell.gpus - 1}."
    if memory == "peak":
        return
    if steps is not None and (step := memory_step(cell)) > steps:
        beside = " beside the profiler" if step != MEMORY_FROM else ""
        yield "instruments.memory", f"{memory} needs a timed step {step}{beside}, found a run of {steps}. Allowed: more steps."
    if memory == "categories" and cell.compile:
        yield "instruments.memory", "categories are told operator by operator, which compiled blocks are not. Allowed: peak."
    if memory == "snapshot" and (cell.launcher == "fork" or cuda is False):
        yield (
            "instruments.memory",
            "snapshot is of the CUDA allocator, which a CPU lacks. Allowed: peak, categories.",
        )
