"""Compares the operators and kernels of two runs: which are new, gone, or called more or less often."""

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
    """An operator or kernel in a run, compared with the same operator or kernel in another run.

    calls, against_calls: calls per step and rank in the run and in the other run; 0 if there are none.
    time_ns, against_time_ns: time per step and rank in ns.
    change: `changed` if the number of calls per step differs. A difference of only the time is not a change, because it may be
    noise.
    """

    name: str  # name of the kernel or operator
    kind: str  # category in the trace
    change: Change
    calls: float
    against_calls: float
    time_ns: float
    against_time_ns: float

    @property
    def more_time_ns(self) -> float:
        """The time in the run minus the time in the other run, per step and rank, in ns."""
        return self.time_ns - self.against_time_ns


class Uses(NamedTuple):
    """The calls of operators and kernels by all ranks together.

    totals: {(kind, name): (number of calls, time in ns)}, over all ranks and steps.

    share: the number by which the totals are divided: the number of profiler steps of all ranks, or the number of ranks if
    whole traces are compared.
    """

    totals: dict[tuple[str, str], tuple[int, int]]
    share: int


def differences(run: Sequence[Trace], against: Sequence[Trace]) -> list[OperatorDifference]:
    """Every operator or kernel of the two runs, sorted by the difference in time, the greatest first.

    The values are per profiler step if all traces of both runs have profiler steps; otherwise they are per trace.
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
    """Add up the calls of the operators and kernels of all ranks.

    Work of a GPU that was launched before the recording began is left out. by_step: whether the totals are per profiler step;
    then work that was launched outside of the steps is left out, too.
    """
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
