"""Divides the time of a step into parts: compute, exposed communication by collective, memory operations, idle time by cause.

The sum of the parts is exactly the time of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from collect.traces.rank_analysis import RankAnalysis
from collect.traces.run_answers import RunAnswers
from collect.traces.stragglers import RankWaits

StepPartKind = Literal["compute", "communication", "memory", "idle"]
WAITING, TRANSFER, UNMATCHED = "waiting for slow ranks", "transfer", ""
UNKNOWN_CAUSE = "cause not recorded"


class StepPart(msgspec.Struct, frozen=True, order=True):
    """A part of the time of a step."""

    kind: StepPartKind
    """What the rank does in this time."""
    of: str = ""
    """For exposed communication the name of the collective, else ""."""
    cause: str = ""
    """For idle time `host`, `communication`, `other` or UNKNOWN_CAUSE; for exposed communication WAITING or TRANSFER, or
    UNMATCHED ("") if the two cannot be distinguished; else ""."""

    @property
    def label(self) -> str:
        """The words for the part in tables and figures."""
        if self.kind == "compute":
            return "compute"
        if self.kind == "memory":
            return "exposed memory operations"
        part_name = f"exposed {self.of}" if self.kind == "communication" else "idle"
        return f"{part_name}: {self.cause}" if self.cause else part_name


class StepTime(msgspec.Struct, frozen=True):
    """The mean time of a step over ranks and steps, in whole ns, and its parts. The sum of the parts is exactly total_ns."""

    steps: int
    """The number of steps of all ranks together. If the traces have no profiler steps, a whole trace counts as one step."""
    total_ns: int
    parts: dict[StepPart, int]


def compute_step_time(runs: Sequence[RunAnswers], *, by_step: bool) -> StepTime:
    """The mean step of these runs. Raises ValueError if there are no steps.

    by_step: whether all ranks have profiler steps; if not, each whole trace counts as one step.
    """
    ns_by_part: dict[StepPart, int] = {}
    for run in runs:
        for rank_index, analysis in enumerate(run.ranks):
            for step_part, part_ns in divide_rank_time(analysis, rank_index, run.waits).items():
                ns_by_part[step_part] = ns_by_part.get(step_part, 0) + part_ns
    return compute_mean_step(
        ns_by_part, sum(rank_analysis.steps if by_step else 1 for run in runs for rank_analysis in run.ranks)
    )


def divide_rank_time(analysis: RankAnalysis, rank_index: int, waits: RankWaits) -> dict[StepPart, int]:
    """Divide the profiled time of one rank into parts, in ns. The sum of the parts is exactly this time, and no part is 0.

    rank_index: the index of the rank in the list of analyses, as used in `waits`. waits: how long ranks waited for slow ranks.
    """
    ns_by_part = {StepPart("compute"): analysis.compute_ns, StepPart("memory"): analysis.memory_ns}
    for call_index, call in enumerate(analysis.calls):
        waiting_ns = waits.waited_ns.get((rank_index, call_index))
        if waiting_ns is None or waits.is_partial:
            exposed_ns_by_cause = {UNMATCHED: call.exposed_ns}
        else:
            exposed_wait_ns = call.measure_exposed_within(waiting_ns)
            exposed_ns_by_cause = {WAITING: exposed_wait_ns, TRANSFER: call.exposed_ns - exposed_wait_ns}
        for cause, part_ns in exposed_ns_by_cause.items():
            step_part = StepPart("communication", call.name, cause)
            ns_by_part[step_part] = ns_by_part.get(step_part, 0) + part_ns
    idle = analysis.idle
    idle_ns_by_cause = {UNKNOWN_CAUSE: analysis.idle_ns} if idle is None else msgspec.structs.asdict(idle)
    for cause, part_ns in idle_ns_by_cause.items():
        ns_by_part[StepPart("idle", cause=cause.removesuffix("_ns"))] = part_ns
    return {step_part: part_ns for step_part, part_ns in ns_by_part.items() if part_ns}


def compute_mean_step(ns_by_part: dict[StepPart, int], step_count: int) -> StepTime:
    """The mean time of a step and of its parts. ns_by_part: for each part, its ns over all ranks and steps. step_count: at
    least 1.

    The mean of a part is rarely a whole number of ns. So all means are rounded down, including the mean of the whole step. If
    the sum of the rounded parts is then less than the rounded whole, the missing ns are added, 1 ns each, to the parts that
    lost most by the rounding. So the error of a part is less than 1 ns."""
    if step_count < 1:
        raise ValueError("the mean of no steps")
    mean_ns_by_part = {step_part: part_ns // step_count for step_part, part_ns in ns_by_part.items()}
    total_ns = sum(ns_by_part.values()) // step_count
    for step_part in sorted(ns_by_part, key=lambda rounded_part: (-(ns_by_part[rounded_part] % step_count), rounded_part))[
        : total_ns - sum(mean_ns_by_part.values())
    ]:
        mean_ns_by_part[step_part] += 1
    return StepTime(step_count, total_ns, mean_ns_by_part)
