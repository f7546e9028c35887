"""Why is run A slower than run B: the difference of their step times as parts that sum to it exactly, in whole ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from collect.traces.run_answers import RunAnswers
from collect.traces.step_parts import StepPart, StepTime, step_time

Unit = Literal["step", "trace"]


class PartDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step in both runs. difference_ns = time_ns - against_ns; 0 ns: the step has no such part."""

    part: StepPart
    label: str
    time_ns: int
    against_ns: int
    difference_ns: int


class StepDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of two runs. The differences of all parts sum to difference_ns = time_ns - against_ns, exactly.

    per: `step` if all traces have profiler steps, else `trace`; times are means over ranks and steps (or ranks) in ns, from the
    first kernel to the last, or of the profiler steps on a CPU. parts: the largest difference first, in either direction.
    """

    per: Unit
    time_ns: int
    against_ns: int
    difference_ns: int
    parts: list[PartDifference]


def difference(runs: Sequence[RunAnswers], against: Sequence[RunAnswers]) -> StepDifference | None:
    """The difference of the mean step of these runs from that of the others.

    None if either has no analysed rank, or one ran on GPUs and the other one on CPUs.
    """
    ranks, others = ([one for run in every for one in run.ranks] for every in (runs, against))
    if not ranks or not others or len({one.kind for one in (*ranks, *others)}) > 1:
        return None
    by_step = all(one.steps for one in (*ranks, *others))
    here, there = (step_time(every, by_step=by_step) for every in (runs, against))
    return between(here, there, "step" if by_step else "trace")


def between(here: StepTime, there: StepTime, per: Unit) -> StepDifference:
    """The difference of two mean steps."""
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
