"""A cell's line of the summary: what all its repeats came to, and each of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from collect.findings.statistics import Estimate
from shardlab.record import SameWork


class RunRow(msgspec.Struct):
    """A run and its metrics: {name: value} in the units of its row."""

    run_id: str
    repeat: int
    attempt: int
    state: str
    why: str
    metrics: dict[str, float]
    gpu_trouble: str = ""  # which of its GPUs were shared, throttled or faulty; '' if none


def flat(cell: dict[str, Any]) -> dict[str, Any]:
    """Nested keys with a dot, as a matrix file may spell them."""
    flat: dict[str, Any] = {}
    for key, value in cell.items():
        flat |= {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


class CellRow(msgspec.Struct, dict=True):
    """A cell. n: completed repeats, over which the metrics are; states: how many repeats are in which state."""

    id: str
    cell: dict[str, Any]
    n: int
    states: dict[str, int]
    expected: bool  # every repeat ended completed or in a state that the cell expects
    same_work: SameWork | None  # the proof's verdict, of the first run that has one
    baseline: str | None  # the cell that speed-up is against
    metrics: dict[str, Estimate]
    runs: list[RunRow]

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The cell with dotted keys: every table asks for them."""
        return flat(self.cell)

    @property
    def is_ranked(self) -> bool:
        """Whether the cell may be ranked among other cells: its GPUs were neither shared nor throttled, and it is proven to do
        the work of one process, or it is meant to do this work and cannot be proven."""
        return not self.gpu_trouble and self.same_work is not None and self.same_work.verdict in ("proven", "not provable")

    @cached_property
    def gpu_trouble(self) -> str:
        """The runs whose GPUs were shared, throttled or faulty, each with its GPUs and the reason; '' if there are none."""
        return "; ".join(f"{run.run_id}: {run.gpu_trouble}" for run in self.runs if run.gpu_trouble)

    @property
    def does_other_work(self) -> bool:
        """Whether it is known not to do the work of one process: by design, or as the proof found."""
        return self.same_work is not None and self.same_work.verdict in ("different", "other work")

    @property
    def state(self) -> str:
        """In words: `completed`, or `2 completed, 1 failed`."""
        if len(self.states) == 1:
            return next(iter(self.states))
        return ", ".join(f"{count} {state}" for state, count in self.states.items())
