"""Finds the straggler of a run: the rank for which the other ranks wait, and the phase of the step in which it is late."""

from __future__ import annotations

import statistics

import msgspec
import polars as pl

from collect.traces.breakdown import Breakdown

PHASE_COLUMNS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")  # the times of the phases, in their order in a step
LEAST_LATE_SHARE = 0.05  # a rank that is late by less than this share of a step is not a straggler
LEAST_TIMED_STEPS = 3


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that the other ranks wait for."""

    rank: int
    phase: str
    """The part of the step in which the rank needs longer than the others; `compute` if the rank was found in traces."""
    late_ms: float
    """How much longer the rank needs than the median rank, per step, in ms."""
    step_ms: float
    """The duration of the median step, in ms."""
    by: str
    """How the rank was found, for a message."""

    @property
    def share_pct(self) -> float:
        """How late the rank is, in percent of the median step."""
        return 100 * self.late_ms / self.step_ms


def find_straggler_by_phases(timed_steps: pl.DataFrame) -> Straggler | None:
    """Find the straggler from the times of the phases of the timed steps; None if no rank is a straggler.

    timed_steps: the timed steps of all ranks, as in `LoadedRun.timed_steps`.

    A collective ends on all ranks at about the same moment, so the other ranks wait for a late rank in the next collective. So
    the first phase in which the ranks differ shows the late rank: in this phase, the late rank needs the longest, and the
    other ranks wait only in later phases. If a phase has a collective in every layer (such as the forward pass of FSDP), the
    phase takes equally long on all ranks, and a late rank is not found; `find_straggler_by_traces` finds it."""
    if timed_steps.is_empty() or timed_steps["rank"].n_unique() < 2 or timed_steps["step"].n_unique() < LEAST_TIMED_STEPS:
        return None
    step_ms = float(timed_steps["step_ms"].median())  # type: ignore[arg-type]
    for phase in PHASE_COLUMNS:
        median_by_rank = timed_steps.drop_nulls(phase).group_by("rank").agg(pl.col(phase).median()).sort(phase, "rank")
        if median_by_rank.height < 2:
            continue
        late_ms = float(median_by_rank[phase][-1]) - float(median_by_rank[phase].median())  # type: ignore[arg-type]
        if late_ms >= LEAST_LATE_SHARE * step_ms:
            rank, phase_name, by = (
                int(median_by_rank["rank"][-1]),
                phase.removesuffix("_ms"),
                "the first phase in which ranks differ",
            )
            return Straggler(rank=rank, phase=phase_name, late_ms=late_ms, step_ms=step_ms, by=by)
    return None


def find_straggler_by_traces(breakdowns: list[Breakdown]) -> Straggler | None:
    """Find the straggler from the traces of several ranks; None if no rank is a straggler.

    The rank that spends the least time in collectives arrives last; the other ranks spend more time there, because they wait.
    """
    usable_breakdowns = [entry for entry in breakdowns if entry.rank is not None and entry.steps and entry.communication_ns]
    if len(usable_breakdowns) < 2:
        return None
    waits_ms = sorted((entry.communication_ns / entry.steps / 1e6, entry.rank or 0) for entry in usable_breakdowns)
    steps_ms = sorted(entry.span_ns / entry.steps / 1e6 for entry in usable_breakdowns)
    median_wait_ms = statistics.median(wait_ms for wait_ms, _ in waits_ms)
    late_ms, step_ms = median_wait_ms - waits_ms[0][0], steps_ms[len(steps_ms) // 2]
    if late_ms < LEAST_LATE_SHARE * step_ms:
        return None
    return Straggler(
        rank=waits_ms[0][1], phase="compute", late_ms=late_ms, step_ms=step_ms, by="the least time in collectives, from traces"
    )
