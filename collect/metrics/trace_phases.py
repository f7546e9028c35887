"""Metrics of the time of each phase of a profiled step: data, forward, backward, optimizer."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric
from collect.metric_values import average_ms_per_step
from collect.traces.rank_analysis import RankAnalysis


def measure_phase_time(run: LoadedRun, phase: str) -> Quantity | None:
    """The time of a phase in ms per step, as the mean over the ranks that were profiled by steps.

    None if no rank has a time for this phase. phase: the name of the phase, such as backward.
    """
    analyses = [analysis for analysis in run.traces.analyses if analysis.steps]
    if not any(phase_record.phase == phase for analysis in analyses for phase_record in analysis.phases):
        return None

    def sum_times(analysis: RankAnalysis) -> int:
        return sum(
            phase_record.host_ns if phase_record.device_ns is None else phase_record.device_ns
            for phase_record in analysis.phases
            if phase_record.phase == phase
        )

    return average_ms_per_step(analyses, sum_times)


METRICS = (
    Metric(
        name="phase_ms",
        unit="ms",
        direction="lower is better",
        definition="Time of a phase of a profiled step. On a GPU: the union of all kernels and memory operations that "
        "were launched in it; on a CPU: the time of the main thread in it. Mean over the profiled ranks. `of` is "
        "data, forward, backward, optimizer or other.",
        of_run_at=measure_phase_time,
        argument="of",
        example="backward",
    ),
)
