"""Computes calls and time of each operator, kernel or collective per profiled step, as means over ranks and repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from collect.traces.breakdown import Breakdown, EventTally


class Use(NamedTuple):
    """How one rank uses an operator, kernel or collective in a step: the number of calls, and their time in ms."""

    calls: float
    ms: float


def compute_uses_per_step(
    runs: Iterable[Sequence[Breakdown]], select_tallies: Callable[[Breakdown], Sequence[EventTally]]
) -> dict[str, Use]:
    """The calls and the time per step of each name: the mean over the ranks of a run with profiler steps, then the mean over
    runs.

    runs: for each run, the breakdowns of its ranks. select_tallies: selects the tallies of a breakdown, such as its kernels.
    """
    by_run = [profiled for run in runs if (profiled := [breakdown for breakdown in run if breakdown.steps])]
    totals: dict[str, Use] = {}
    for profiled in by_run:
        for breakdown in profiled:
            share = breakdown.steps * len(profiled) * len(by_run)
            for tally in select_tallies(breakdown):
                earlier = totals.get(tally.name, Use(0, 0))
                totals[tally.name] = Use(earlier.calls + tally.count / share, earlier.ms + tally.total_ns / share / 1e6)
    return totals
