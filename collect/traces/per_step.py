"""Computes calls and time of each operator, kernel or collective per profiled step, as means over ranks and repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from collect.traces.breakdown import Breakdown, EventTally


class OperatorUse(NamedTuple):
    """How one rank uses an operator, kernel or collective in a step: the number of calls, and their time in ms."""

    calls: float
    total_ms: float


def compute_uses_per_step(
    runs: Iterable[Sequence[Breakdown]], select_tallies: Callable[[Breakdown], Sequence[EventTally]]
) -> dict[str, OperatorUse]:
    """The calls and the time per step of each name: the mean over the ranks of a run with profiler steps, then the mean over
    runs.

    runs: for each run, the breakdowns of its ranks. select_tallies: selects the tallies of a breakdown, such as its kernels.
    """
    breakdowns_by_run = [
        profiled_ranks for run in runs if (profiled_ranks := [breakdown for breakdown in run if breakdown.steps])
    ]
    use_by_name: dict[str, OperatorUse] = {}
    for profiled_ranks in breakdowns_by_run:
        for breakdown in profiled_ranks:
            divisor = breakdown.steps * len(profiled_ranks) * len(breakdowns_by_run)
            for tally in select_tallies(breakdown):
                sum_so_far = use_by_name.get(tally.name, OperatorUse(0, 0))
                use_by_name[tally.name] = OperatorUse(
                    sum_so_far.calls + tally.count / divisor, sum_so_far.total_ms + tally.total_ns / divisor / 1e6
                )
    return use_by_name
