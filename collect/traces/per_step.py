"""Computes calls and time of each operator, kernel or collective per profiled step, as means over ranks and repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from collect.traces.breakdown import Breakdown, EventTally


class Use(NamedTuple):
    """How one rank uses an operator, kernel or collective in a step: the number of calls, and their time in ms."""

    calls: float
    ms: float


def uses(runs: Iterable[Sequence[Breakdown]], tallies: Callable[[Breakdown], Sequence[EventTally]]) -> dict[str, Use]:
    """The calls and the time per step of each name: the mean over the ranks of a run with profiler steps, then the mean over
    runs.

    runs: for each run, the breakdowns of its ranks. tallies: selects the tallies of a breakdown, such as its kernels.
    """
    by_run = [known for run in runs if (known := [one for one in run if one.steps])]
    totals: dict[str, Use] = {}
    for known in by_run:
        for one in known:
            share = one.steps * len(known) * len(by_run)
            for tally in tallies(one):
                before = totals.get(tally.name, Use(0, 0))
                totals[tally.name] = Use(before.calls + tally.count / share, before.ms + tally.total_ns / share / 1e6)
    return totals
