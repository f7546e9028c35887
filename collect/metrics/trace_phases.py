"""Metrics of the time of each phase of a profiled step: data, forward, backward, optimizer."""

from __future__ import annotations

import statistics

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric


def phase_time(run: LoadedRun, phase: str) -> Quantity | None:
    """The time of a phase in ms per step, as the mean over the ranks that were profiled by steps.

    None if no rank has a time for this phase. phase: the name of the phase, such as backward.
    """
    ranks = [analysis for analysis in run.traces.analyses if analysis.steps]
    times = [
        [time.host_ns if time.device_ns is None else time.device_ns for time in analysis.phases if time.phase == phase]
        for analysis in ranks
    ]
    if not any(times):
        return None
    by_rank = [sum(rank_times) / analysis.steps for analysis, rank_times in zip(ranks, times, strict=True)]
    return Quantity(statistics.fmean(by_rank) / 1e6, "ms", ranks[0].kind)


METRICS = (
    Metric(
        name="phase_ms",
        unit="ms",
        direction="lower is better",
        definition="Time of a phase of a profiled step. On a GPU: the union of all kernels and memory operations that were "
        "launched in it; on a CPU: the time of the main thread in it. Mean over the profiled ranks. `of` is data, forward, "
        "backward, optimizer or other.",
        of_run_at=phase_time,
        argument="of",
        example="backward",
    ),
)
