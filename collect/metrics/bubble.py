"""Metrics of the bubble of a pipeline, the time in which its ranks wait for each other: by theory, and from step records."""

from __future__ import annotations

import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.sources.steps import select_unwatched_steps
from shardlab.matrix.cell import Cell

PIPELINE_KEYS = ("cell.pp", "cell.options")  # keys of run.json
ACCUMULATION_KEYS = ("cell.gradient_accumulation_steps",)
FORWARD_DURATION, BACKWARD_DURATION = 1.0, 2.0  # durations of passes in study 4's simulation of pipelines, in forward passes


def compute_theoretical_bubble(run: LoadedRun) -> Quantity | None:
    """The bubble of a run's pipeline by theory, in percent: 100 (P - 1) / (v M + P - 1).

    P: number of ranks of a pipeline; M: number of micro-batches; v: number of stages per rank. None for a cell without a
    pipeline, and for a run without timed steps.
    """
    cell = _find_pipeline_cell(run)
    if cell is None or run.timed_steps.is_empty():
        return None
    stages_per_rank = cell.options.get("stages_per_rank", 1)
    assert isinstance(stages_per_rank, int)
    return Quantity(compute_theoretical_bubble_pct(cell.pp, stages_per_rank * cell.gradient_accumulation_steps), "%")


def compute_theoretical_bubble_pct(rank_count: int, pass_count: float) -> float:
    """The bubble of a pipeline by theory, in percent of its time.

    rank_count: number of ranks of the pipeline. pass_count: number of micro-batches times number of stages per rank.
    """
    return 100 * (rank_count - 1) / (pass_count + rank_count - 1)


def compute_theoretical_time(run: LoadedRun) -> Quantity | None:
    """The time of a step of the pipeline by theory, with its bubble: 3 (M + (P - 1) / v), in forward passes.

    P, M, v: see `compute_theoretical_bubble`. The unit is the forward pass of one micro-batch through all stages of a rank; a
    backward pass takes 2 of it, and messages take none. None for a cell without a pipeline, and for a run without timed steps.
    """
    cell, ideal_time = _find_pipeline_cell(run), compute_ideal_time(run)
    if cell is None or ideal_time is None:
        return None
    stages_per_rank = cell.options.get("stages_per_rank", 1)
    assert isinstance(stages_per_rank, int)
    return Quantity(ideal_time.value + (FORWARD_DURATION + BACKWARD_DURATION) * (cell.pp - 1) / stages_per_rank, "")


def compute_ideal_time(run: LoadedRun) -> Quantity | None:
    """The time of a step of the pipeline without a bubble: 3 M, in forward passes. None whenever `compute_theoretical_time` is
    None."""
    cell = _find_pipeline_cell(run)
    if cell is None or run.timed_steps.is_empty():
        return None
    return Quantity((FORWARD_DURATION + BACKWARD_DURATION) * cell.gradient_accumulation_steps, "")


def compute_theoretical_throughput(run: LoadedRun) -> Quantity | None:
    """Micro-batches per duration of a forward pass, by theory: M / `compute_theoretical_time`. None whenever
    `compute_theoretical_time` is None."""
    cell, step_time = _find_pipeline_cell(run), compute_theoretical_time(run)
    return None if cell is None or step_time is None else Quantity(cell.gradient_accumulation_steps / step_time.value, "")


def compute_measured_bubble(run: LoadedRun) -> Quantity | None:
    """The measured bubble in percent: 100 (1 - (F + B) / T), where each time is a sum over the timed steps.

    F: forward time of the first stage; B: backward time of the last stage (both are means over replicas); T: forward and
    backward time of the slowest rank.

    The forward and backward times of a rank include the time in which it waits. The first stage never waits in forward, and the
    last stage never waits in backward, so F + B is the time that a rank computes if all stages take equally long. None if a
    rank has several stages, or if F + B is greater than T, because the stages then do not take equally long.
    """
    cell = _find_pipeline_cell(run)
    if cell is None or cell.options.get("stages_per_rank", 1) != 1:
        return None
    phase_times = select_unwatched_steps(run.timed_steps).drop_nulls(["forward_ms", "backward_ms"])
    # The ranks of one stage have consecutive numbers (trainers/parallel/mesh_model.py).
    ranks_per_stage = cell.gpus // cell.pp
    phase_times = phase_times.with_columns(
        stage=pl.col("rank") // ranks_per_stage, passes=pl.col("forward_ms") + pl.col("backward_ms")
    )
    total_ms = float(phase_times.group_by("step", maintain_order=True).agg(pl.max("passes"))["passes"].sum())
    first_stage, last_stage = phase_times.filter(pl.col("stage") == 0), phase_times.filter(pl.col("stage") == cell.pp - 1)
    if total_ms <= 0 or first_stage.is_empty() or last_stage.is_empty():
        return None
    computed_ms = (float(first_stage["forward_ms"].sum()) + float(last_stage["backward_ms"].sum())) / ranks_per_stage
    return Quantity(100 * (1 - computed_ms / total_ms), "%", "of equally long stages") if computed_ms <= total_ms else None


def _find_pipeline_cell(run: LoadedRun) -> Cell | None:
    """The cell of a run if it has a pipeline, else None."""
    cell = run.training_cell
    return cell if cell is not None and cell.pp > 1 else None


METRICS = (
    Metric(
        name="bubble_theory_pct",
        column=MetricColumn("times", 50, "Bubble, theory", 3),
        unit="%",
        direction="lower is better",
        definition="Share of a pipeline's time in which a rank has nothing to do, (P - 1) / (v M + P - 1) for P "
        "ranks, M micro-batches and v stages a rank (Huang et al., GPipe, 2019, section 2.3; Narayanan et al., 2021, "
        "section 2.2, which divide by the busy time instead: (P - 1) / (v M)).",
        of_run=compute_theoretical_bubble,
        reads=Reads(steps="timed", run=(*PIPELINE_KEYS, *ACCUMULATION_KEYS)),
        exact=True,
    ),
    Metric(
        name="bubble_pct",
        column=MetricColumn("times", 40, "Bubble", 3),
        unit="%",
        direction="lower is better",
        definition="Share of the forward and backward time in which a rank waits, computed from the step records for stages "
        "that take equally long: the first stage never waits in forward, the last stage never in backward; the rest of the "
        "slowest rank's time is the bubble, which includes the time for sending. Blank if a rank has several stages.",
        of_run=compute_measured_bubble,
        reads=Reads(steps="timed", run=PIPELINE_KEYS),
    ),
    Metric(
        name="pipeline_time_theory",
        unit="",
        direction="neither",
        definition="Time of a pipeline's step by theory, 3 (M + (P - 1) / v), in forward passes of one micro-batch "
        "through the stages of a rank; a backward pass takes 2 of them, messages take none (study 4, pipeline "
        "simulation: pipeline time).",
        of_run=compute_theoretical_time,
        reads=Reads(steps="timed", run=(*PIPELINE_KEYS, *ACCUMULATION_KEYS)),
        exact=True,
    ),
    Metric(
        name="pipeline_ideal_time_theory",
        unit="",
        direction="neither",
        definition="Time of a pipeline's step without a bubble, 3 M, in the unit of pipeline_time_theory (study 4, "
        "pipeline simulation: ideal time).",
        of_run=compute_ideal_time,
        reads=Reads(steps="timed", run=("cell.pp", *ACCUMULATION_KEYS)),
        exact=True,
    ),
    Metric(
        name="pipeline_throughput_theory",
        unit="",
        direction="neither",
        definition="Micro-batches per unit of pipeline_time_theory, M over this time (study 4, pipeline simulation: "
        "throughput).",
        of_run=compute_theoretical_throughput,
        reads=Reads(steps="timed", run=(*PIPELINE_KEYS, *ACCUMULATION_KEYS)),
        exact=True,
    ),
)
