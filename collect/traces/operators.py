"""Compares the operators of two runs: new, gone, or called more or less often (as paper 2 compares strategies)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from collect.traces.breakdown import steps, tally
from collect.traces.launches import launches
from collect.traces.trace import Trace

KINDS = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset")
Change = Literal["new", "gone", "changed", "same"]


class OperatorDifference(msgspec.Struct, frozen=True):
    """An operator or kernel of a run beside that of another. calls, time_ns: a step and rank; 0: it is not there.

    change: `changed` where it is called more or less often a step; a difference in time alone is noise as well.
    """

    name: str
    kind: str
    change: Change
    calls: float
    against_calls: float
    time_ns: float
    against_time_ns: float

    @property
    def more_time_ns(self) -> float:
        """How much more time a step takes than in the other run, in ns."""
        return self.time_ns - self.against_time_ns


class Uses(NamedTuple):
    """Calls and ns of each (kind, name), all ranks and steps together. share: ranks x steps, or the ranks without steps."""

    totals: dict[tuple[str, str], tuple[int, int]]
    share: int


def differences(run: Sequence[Trace], against: Sequence[Trace]) -> list[OperatorDifference]:
    """Every operator of either, that whose time differs most first.

    Steps are counted where both have profiler steps; otherwise whole traces are compared.
    """
    by_step = all(steps(trace) for trace in (*run, *against))
    here, there = uses(run, by_step=by_step), uses(against, by_step=by_step)
    found = []
    for kind, name in here.totals.keys() | there.totals.keys():
        calls, ns = here.totals.get((kind, name), (0, 0))
        other_calls, other_ns = there.totals.get((kind, name), (0, 0))
        found.append(
            OperatorDifference(
                name=name,
                kind=kind,
                change=_change(calls * there.share, other_calls * here.share),
                calls=calls / here.share,
                against_calls=other_calls / there.share,
                time_ns=ns / here.share,
                against_time_ns=other_ns / there.share,
            )
        )
    return sorted(found, key=lambda one: (-abs(one.more_time_ns), one.kind, one.name))


def uses(traces: Sequence[Trace], *, by_step: bool) -> Uses:
    """What the ranks call, added up. What a GPU was told before the recording began is left out, and by steps also
    what was launched outside of them."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for trace in traces:
        gpu = launches(trace)
        left_out = gpu.before_recording | (gpu.outside_steps if by_step else False)
        for kind in KINDS:
            for one in tally(trace, trace.of_category(kind) & ~left_out):
                calls, ns = totals.get((kind, one.name), (0, 0))
                totals[kind, one.name] = (calls + one.count, ns + one.total_ns)
    return Uses(totals, sum(steps(trace) if by_step else 1 for trace in traces))


def _change(calls: int, other: int) -> Change:
    if not calls or not other:
        return "new" if calls else "gone"
    return "same" if calls == other else "changed"
