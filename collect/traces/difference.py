"""Explains why a run is slower than another run: it divides the difference between their step times into parts, in whole ns.

The sum of the parts is exactly the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from collect.traces.run_answers import RunAnswers
from collect.traces.step_parts import StepPart, StepTime, step_time

Unit = Literal["step", "trace"]


class PartDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step (such as compute) in both runs, in ns. difference_ns = time_ns - against_ns.

    time_ns: the time in the run. against_ns: the time in the run with which it is compared. 0: a step does not have this part.
    """

    part: StepPart  # which part of a step
    label: str  # the part in words
    time_ns: int
    against_ns: int
    difference_ns: int  # time_ns - against_ns


class StepDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of two runs. The sum over all parts is exactly difference_ns = time_ns - against_ns.

    per: `step` if all traces have profiler steps, else `trace`.
    time_ns, against_ns: the mean time of a step (or of a trace) over ranks and steps, in ns: from the first kernel to the last
    one, or on a CPU the duration of the profiler steps.
    parts: sorted by the absolute value of their difference, the largest first.
    """

    per: Unit
    time_ns: int
    against_ns: int
    difference_ns: int  # how much longer a step is than in the other run
    parts: list[PartDifference]


def difference(runs: Sequence[RunAnswers], against: Sequence[RunAnswers]) -> StepDifference | None:
    """The difference between the mean step of `runs` and the mean step of `against`.

    None if no rank of `runs` or no rank of `against` was analysed, or if some ranks ran on GPUs and others on CPUs.
    """
    ranks, others = ([one for run in every for one in run.ranks] for every in (runs, against))
    if not ranks or not others or len({one.kind for one in (*ranks, *others)}) > 1:
        return None
    by_step = all(one.steps for one in (*ranks, *others))
    here, there = (step_time(every, by_step=by_step) for every in (runs, against))
    return between(here, there, "step" if by_step else "trace")


def between(here: StepTime, there: StepTime, per: Unit) -> StepDifference:
    """The difference between two mean steps, part by part: time of `here` minus time of `there`."""
    found = [
        PartDifference(
            part=part,
            label=part.label,
            time_ns=here.parts.get(part, 0),
            against_ns=there.parts.get(part, 0),
            difference_ns=here.parts.get(part, 0) - there.parts.get(part, 0),
        )
        for part in here.parts.keys() | there.parts.keys()
    ]
    return StepDifference(
        per=per,
        time_ns=here.total_ns,
        against_ns=there.total_ns,
        difference_ns=here.total_ns - there.total_ns,
        parts=sorted(found, key=lambda one: (-abs(one.difference_ns), one.part)),
    )
