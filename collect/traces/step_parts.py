"""A step's time as parts that sum to it: compute, exposed communication by collective, memory operations, idle by cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from collect.traces.rank_analysis import RankAnalysis
from collect.traces.run_answers import RunAnswers
from collect.traces.stragglers import Waits

Kind = Literal["compute", "communication", "memory", "idle"]
WAITING, TRANSFER, UNMATCHED = "waiting for slow ranks", "transfer", ""
UNKNOWN_CAUSE = "cause not recorded"


class StepPart(msgspec.Struct, frozen=True, order=True):
    """A part of a step's time.

    kind: what runs. of: the collective of exposed communication, else "". cause: of idle time `host`, `communication`, `other`
    or that its cause is not recorded; of exposed communication waiting for slow ranks or transfer, "" if the two cannot be told
    apart; else "".
    """

    kind: Kind
    of: str = ""
    cause: str = ""

    @property
    def label(self) -> str:
        """How tables and figures name the part."""
        if self.kind == "compute":
            return "compute"
        if self.kind == "memory":
            return "exposed memory operations"
        what = f"exposed {self.of}" if self.kind == "communication" else "idle"
        return f"{what}: {self.cause}" if self.cause else what


class StepTime(msgspec.Struct, frozen=True):
    """The mean time of a step over ranks and steps, in whole ns, and its parts, which sum to it exactly.

    steps: over how many steps of all ranks together; if traces have no profiler steps, a whole trace counts as one.
    """

    steps: int
    total_ns: int
    parts: dict[StepPart, int]


def step_time(runs: Sequence[RunAnswers], *, by_step: bool) -> StepTime:
    """The mean step of these runs. by_step: all ranks have profiler steps; else whole traces count. ValueError for none."""
    sums: dict[StepPart, int] = {}
    for run in runs:
        for place, analysis in enumerate(run.ranks):
            for part, ns in parts(analysis, place, run.waits).items():
                sums[part] = sums.get(part, 0) + ns
    return mean(sums, sum(one.steps if by_step else 1 for run in runs for one in run.ranks))


def parts(analysis: RankAnalysis, place: int, waited: Waits) -> dict[StepPart, int]:
    """The span of one rank as parts in ns, which sum to it exactly; no part is 0. place: of the rank in `waited`."""
    found = {StepPart("compute"): analysis.compute_ns, StepPart("memory"): analysis.memory_ns}
    for index, call in enumerate(analysis.calls):
        waiting = waited.waited.get((place, index))
        if waiting is None:
            shares = {UNMATCHED: call.exposed_ns}
        else:
            lost = call.exposed_within(waiting)
            shares = {WAITING: lost, TRANSFER: call.exposed_ns - lost}
        for cause, ns in shares.items():
            part = StepPart("communication", call.name, cause)
            found[part] = found.get(part, 0) + ns
    idle = analysis.idle
    causes = {UNKNOWN_CAUSE: analysis.idle_ns} if idle is None else msgspec.structs.asdict(idle)
    for cause, ns in causes.items():
        found[StepPart("idle", cause=cause.removesuffix("_ns"))] = ns
    return {part: ns for part, ns in found.items() if ns}


def mean(sums: dict[StepPart, int], steps: int) -> StepTime:
    """The mean of a step. sums: ns of each part over all ranks and steps. steps: at least 1.

    The mean of a part is rarely a whole number of ns. All means are rounded down, that of the whole too; the ns by which the
    rounded parts fall short of the rounded whole go to the parts that lost most by rounding. So a part is less than 1 ns off.
    """
    if steps < 1:
        raise ValueError("the mean of no steps")
    shares = {part: ns // steps for part, ns in sums.items()}
    total = sum(sums.values()) // steps
    for part in sorted(sums, key=lambda one: (-(sums[one] % steps), one))[: total - sum(shares.values())]:
        shares[part] += 1
    return StepTime(steps, total, shares)
