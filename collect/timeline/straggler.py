"""Which rank the others wait for, and in which phase of the step."""

from __future__ import annotations

import msgspec
import polars as pl

from collect.traces.breakdown import Breakdown

PHASES = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")  # in the order of a step
LEAST_SHARE = 0.05  # of a step: by less than this, a rank is no straggler
LEAST_STEPS = 3


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that the others wait for.

    phase: the part of the step in which it needs longer; `compute` if that is known from traces alone. late_ms: by how much
    longer than the median rank, per step. step_ms: the median step. by: how it was found.
    """

    rank: int
    phase: str
    late_ms: float
    step_ms: float
    by: str

    @property
    def share_pct(self) -> float:
        """late_ms in percent of the step."""
        return 100 * self.late_ms / self.step_ms


def by_phases(timed: pl.DataFrame) -> Straggler | None:
    """From the timed steps of all ranks, as in `LoadedRun.timed`; None if no rank is a straggler.

    A collective ends on all ranks at about the same moment, so a late rank makes the others wait in the first collective after
    it was late. So the first phase in which ranks differ tells: there the late rank needs the longest, and only later phases
    hold the waiting of the others. A rank that is late within a phase that has a collective in every layer (such as FSDP's
    forward) is not seen: then all ranks need as long. Traces (`by_traces`) show it.
    """
    if timed.is_empty() or timed["rank"].n_unique() < 2 or timed["step"].n_unique() < LEAST_STEPS:
        return None
    step_ms = float(timed["step_ms"].median())  # type: ignore[arg-type]
    for phase in PHASES:
        per_rank = timed.drop_nulls(phase).group_by("rank").agg(pl.col(phase).median()).sort(phase, "rank")
        if per_rank.height < 2:
            continue
        late_ms = float(per_rank[phase][-1]) - float(per_rank[phase].median())  # type: ignore[arg-type]
        if late_ms >= LEAST_SHARE * step_ms:
            return Straggler(
                rank=int(per_rank["rank"][-1]),
                phase=phase.removesuffix("_ms"),
                late_ms=late_ms,
                step_ms=step_ms,
                by="the first phase in which ranks differ",
            )
    return None


def by_traces(profiled: list[Breakdown]) -> Straggler | None:
    """From the traces of several ranks: the rank that spends the least time in collectives arrives last; the others wait."""
    known = [one for one in profiled if one.rank is not None and one.steps and one.communication_ns]
    if len(known) < 2:
        return None
    waits_ms = sorted((one.communication_ns / one.steps / 1e6, one.rank or 0) for one in known)
    steps_ms = sorted(one.span_ns / one.steps / 1e6 for one in known)
    middle = len(waits_ms) // 2
    median = waits_ms[middle][0] if len(waits_ms) % 2 else (waits_ms[middle - 1][0] + waits_ms[middle][0]) / 2
    late_ms, step_ms = median - waits_ms[0][0], steps_ms[len(steps_ms) // 2]
    if late_ms < LEAST_SHARE * step_ms:
        return None
    return Straggler(
        rank=waits_ms[0][1], phase="compute", late_ms=late_ms, step_ms=step_ms, by="the least time in collectives, from traces"
    )
