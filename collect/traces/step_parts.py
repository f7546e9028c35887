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
    ns_of_part: dict[StepPart, int] = {}
    for run in runs:
        for rank_index, analysis in enumerate(run.ranks):
            for part, ns in divide_rank_time(analysis, rank_index, run.waits).items():
                ns_of_part[part] = ns_of_part.get(part, 0) + ns
    return compute_mean_step(
        ns_of_part, sum(rank_analysis.steps if by_step else 1 for run in runs for rank_analysis in run.ranks)
    )


def divide_rank_time(analysis: RankAnalysis, rank_index: int, waits: RankWaits) -> dict[StepPart, int]:
    """Divide the profiled time of one rank into parts, in ns. The sum of the parts is exactly this time, and no part is 0.

    rank_index: the index of the rank in the list of analyses, as used in `waits`. waits: how long ranks waited for slow ranks.
    """
    part_times = {StepPart("compute"): analysis.compute_ns, StepPart("memory"): analysis.memory_ns}
    for index, call in enumerate(analysis.calls):
        waiting_ns = waits.waited.get((rank_index, index))
        if waiting_ns is None or waits.is_partial:
            ns_of_cause = {UNMATCHED: call.exposed_ns}
        else:
            waited_ns = call.exposed_within(waiting_ns)
            ns_of_cause = {WAITING: waited_ns, TRANSFER: call.exposed_ns - waited_ns}
        for cause, ns in ns_of_cause.items():
            part = StepPart("communication", call.name, cause)
            part_times[part] = part_times.get(part, 0) + ns
    idle = analysis.idle
    ns_of_idle_cause = {UNKNOWN_CAUSE: analysis.idle_ns} if idle is None else msgspec.structs.asdict(idle)
    for cause, ns in ns_of_idle_cause.items():
        part_times[StepPart("idle", cause=cause.removesuffix("_ns"))] = ns
    return {part: ns for part, ns in part_times.items() if ns}


def compute_mean_step(ns_of_part: dict[StepPart, int], steps: int) -> StepTime:
    """The mean time of a step and of its parts. ns_of_part: for each part, its ns over all ranks and steps. steps: at least 1.

    The mean of a part is rarely a whole number of ns. So all means are rounded down, including the mean of the whole step. If
    the sum of the rounded parts is then less than the rounded whole, the missing ns are added, 1 ns each, to the parts that
    lost most by the rounding. So the error of a part is less than 1 ns.
    """
    if steps < 1:
        raise ValueError("the mean of no steps")
    mean_ns_of_part = {part: ns // steps for part, ns in ns_of_part.items()}
    total_ns = sum(ns_of_part.values()) // steps
    for part in sorted(ns_of_part, key=lambda sum_part: (-(ns_of_part[sum_part] % steps), sum_part))[
        : total_ns - sum(mean_ns_of_part.values())
    ]:
        mean_ns_of_part[part] += 1
    return StepTime(steps, total_ns, mean_ns_of_part)
