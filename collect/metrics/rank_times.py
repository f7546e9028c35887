"""Metrics of ranks that do not keep step with each other: the throughput of each rank by its own time, and how long ranks wait.

They are computed from the phases of the steps, so they need no traces.
"""

from __future__ import annotations

import statistics

import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, Reads
from collect.sources.steps import select_unwatched_steps

WAITING_PHASES = ("forward_ms", "backward_ms", "optimizer_ms")  # a rank does not wait for others while it fetches its data


def sum_rank_throughputs(run: LoadedRun) -> Quantity | None:
    """The sum over the ranks of the units per second of each rank, over its own timed steps.

    None if the run has one rank, or if ranks share a model: then they all need the same time.
    """
    if not _ranks_have_equal_work(run):
        return None
    units_per_s = 1000 * pl.col("units").sum() / pl.col("step_ms").sum()
    rank_rates = select_unwatched_steps(run.timed_steps).group_by("rank").agg(rate=units_per_s)
    unit = run.result.unit if run.result else "units"
    return Quantity(float(rank_rates["rate"].sum()), f"{unit}/s") if rank_rates.height else None


def measure_waiting_by_rank(run: LoadedRun) -> dict[int, float]:
    """How long each rank waits for other ranks in a step, in ms: {rank: ms}; empty if it is not known.

    All ranks have the same work in a phase. So what a phase takes longer than on the rank where it is the shortest is waiting.
    The median over the timed steps is used for each phase and rank, and the phases are added. A straggler by its own fault (as
    in `data`) does not wait itself.
    """
    if not _ranks_have_equal_work(run):
        return {}
    phase_medians = select_unwatched_steps(run.timed_steps).group_by("rank").agg(pl.col(WAITING_PHASES).median()).sort("rank")
    if phase_medians.is_empty() or any(phase_medians[phase].null_count() for phase in WAITING_PHASES):
        return {}
    phase_waiting_ms = phase_medians.with_columns(pl.col(phase) - pl.col(phase).min() for phase in WAITING_PHASES)
    return dict(
        zip(
            phase_waiting_ms["rank"].to_list(),
            phase_waiting_ms.select(pl.sum_horizontal(WAITING_PHASES)).to_series().to_list(),
            strict=True,
        )
    )


def average_phase_waiting(run: LoadedRun) -> Quantity | None:
    """The mean of `measure_waiting_by_rank` over the ranks; None if it is not known."""
    waiting_ms_by_rank = measure_waiting_by_rank(run)
    return Quantity(statistics.fmean(waiting_ms_by_rank.values()), "ms") if waiting_ms_by_rank else None


def _ranks_have_equal_work(run: LoadedRun) -> bool:
    """Whether several ranks train, each with a whole model and an equal part of the batch."""
    return run.run is not None and run.cell.gpus == run.cell.dp and run.cell.gpus > 1


METRICS = (
    Metric(
        name="rank_throughput_per_s",
        unit="units/s",
        direction="higher is better",
        definition="Sum over the ranks of units per second, of each rank over the time of its own timed steps. If "
        "ranks do not wait for each other, a fast rank ends earlier; this is the throughput while all of them train. "
        "Only if each rank has a whole model.",
        of_run=sum_rank_throughputs,
        reads=Reads(steps="timed", result=("unit",)),
    ),
    Metric(
        name="phase_waiting_ms",
        unit="ms",
        direction="lower is better",
        definition="Waiting for other ranks in a step, mean over ranks, from the phases of steps: what forward, backward and "
        "optimizer take longer (medians) than on the rank where the phase is the shortest. Time of data is not waiting. Exact "
        "only if ranks compute equally fast; traces give `waiting_ms`. Only if each rank has a whole model.",
        of_run=average_phase_waiting,
        reads=Reads(steps="timed"),
    ),
)
