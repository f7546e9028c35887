"""The simulated schedule of the pipeline of one cell, as `jobs plan --schedule CELL` prints it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from jobs.planner import pipeline_schedule, pipeline_share
from jobs.planner.pipeline_schedule import SimulatedPipeline
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import Prediction
from shardlab.terminal.notation import format_amount

# the time of a pass of one micro-batch through all stages of a rank; `step_time` uses the same ratio of backward to forward
FORWARD_TIME, BACKWARD_TIME = 1.0, 2.0


class CellSchedule(msgspec.Struct, frozen=True):
    """One simulated step of a cell. The unit of time is a forward pass of one micro-batch through all stages of a rank."""

    cell: str
    schedule: str
    """The name of the schedule: gpipe, 1f1b or interleaved."""
    ranks: int
    """The number of ranks of one pipeline."""
    stages: int
    """The number of stages on all ranks of the pipeline together."""
    micro_batches: int
    total: float
    ideal: float
    """The time that the step would take if no rank waited."""
    bubble: float
    """The share of the step in which a rank waits, 0 to 1: (total - ideal) / total."""
    throughput: float
    """Micro-batches per unit of time."""
    timeline: tuple[str, ...]
    """For each rank, a line of text that shows from left to right which passes the rank makes and when it waits."""


def make_schedule(cell: Cell) -> CellSchedule:
    """Simulate the pipeline schedule of a cell. The cell must have a pipeline (pp above 1)."""
    simulated_step = simulate_pipeline_of_cell(cell)
    return CellSchedule(
        cell.name(),
        pipeline_share.read_schedule_name(cell),
        cell.pp,
        cell.pp * cell.stages_per_rank,
        simulated_step.micro_batch_count,
        simulated_step.total_time,
        simulated_step.ideal_time,
        simulated_step.bubble_share,
        simulated_step.micro_batches_per_time,
        tuple(pipeline_schedule.draw_timeline(simulated_step)),
    )


def simulate_pipeline_of_cell(cell: Cell) -> SimulatedPipeline:
    """Simulate one step of the pipeline of a cell. In this simulation, messages between stages take no time."""
    return pipeline_schedule.simulate_pipeline(
        pipeline_share.read_schedule_name(cell),
        cell.pp,
        cell.gradient_accumulation_steps,
        forward_time=FORWARD_TIME,
        backward_time=BACKWARD_TIME,
        rank_stages=cell.stages_per_rank,
    )


def describe_schedule(schedule: CellSchedule, cell_prediction: Prediction) -> Iterator[str]:
    """The timeline of a simulated step and the numbers that describe it, as lines of text. cell_prediction: the prediction for
    the same cell."""
    yield (
        f"{schedule.cell}: {schedule.schedule}, {schedule.ranks} ranks, {schedule.stages} stages, {schedule.micro_batches} "
        "micro-batches; digits: forward, letters: backward, dots: waiting"
    )
    yield from schedule.timeline
    yield (
        f"total {schedule.total:.1f}, ideal {schedule.ideal:.1f}, bubble {schedule.bubble:.1%}, "
        f"throughput {schedule.throughput:.3f} micro-batches per unit; the unit is a forward pass, "
        f"and a backward pass takes {BACKWARD_TIME:g} units"
    )
    if (compute_s := cell_prediction.step_parts_s.get("compute")) is not None:
        forward_s, waiting_s = compute_s / schedule.ideal, cell_prediction.step_parts_s.get("bubble", 0.0)
        forward_text, bubble_text = f"{format_amount(1000 * forward_s)} ms", f"{format_amount(1000 * waiting_s)} ms"
        yield f"predicted: a forward pass takes {forward_text}, and the bubble {bubble_text} of a step"
