"""Turns step records into frames: all steps, the timed steps of each rank, and the timed steps of the world (all ranks)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from shardlab.runs.record import StepRecord

STEP_COLUMN_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("rank", "step"), pl.Int64),
    **dict.fromkeys(("warmup", "watched"), pl.Boolean),
    **dict.fromkeys(("t_s", "wall_s", "loss"), pl.Float64),
    "units": pl.Int64,
    **dict.fromkeys(("step_ms", "data_ms", "forward_ms", "backward_ms", "optimizer_ms"), pl.Float64),
    **dict.fromkeys(("allocated_bytes", "reserved_bytes", "rss_bytes"), pl.Int64),
    "cpu_s": pl.Float64,
    **dict.fromkeys(("disk_read_bytes", "disk_write_bytes"), pl.Int64),
}


class RecordedSteps(NamedTuple):
    """The step records of a run, and the number of ranks."""

    steps: Mapping[int, Sequence[StepRecord]]
    """Rank -> its step records."""
    ranks: int = 0
    """The number of ranks that train."""
    data_ranks: int = 0
    """The number of ranks that get different data: fewer if ranks share a model (tensor and pipeline parallel)."""
    first_lost_step: int | None = None
    """The first timed step that one rank did not make because the cell ended its process on purpose; None: no rank."""


class StepFrames(NamedTuple):
    """The steps of a run as frames."""

    all_steps: pl.DataFrame
    """All recorded steps, one row per rank and step, including warm-up."""
    timed_steps: pl.DataFrame
    """The timed steps that every rank recorded, one row per rank and step. A rank that the cell ended on purpose need not have
    recorded the steps after its end."""
    world_steps: pl.DataFrame
    """The same timed steps, joined over all ranks, one row per step."""


def build_step_frames(recorded_steps: RecordedSteps) -> StepFrames:
    """The frames of the steps of one run."""
    return StepFrames(*(step_rows.drop("run") for step_rows in build_step_frames_of_runs([recorded_steps])))


def build_step_frames_of_runs(recorded_runs: Sequence[RecordedSteps]) -> StepFrames:
    """The frames of many runs together, because making a frame takes about as long for one run as for a hundred.

    The frames have a column `recorded_run`: the index of the run in `recorded_runs`.
    """
    values_by_column: dict[str, list[object]] = {name: [] for name in ("run", "rank", *StepRecord.__struct_fields__)}
    for run_index, recorded_run in enumerate(recorded_runs):
        for rank, step_records in recorded_run.steps.items():
            values_by_column["run"] += [run_index] * len(step_records)
            values_by_column["rank"] += [rank] * len(step_records)
            for name, field_values in zip(StepRecord.__struct_fields__, zip(*map(msgspec.structs.astuple, step_records))):
                values_by_column[name] += field_values
    column_types = {"run": pl.Int64, **STEP_COLUMN_TYPES}
    step_rows = pl.DataFrame({name: values_by_column[name] for name in column_types}, schema=column_types)
    step_rows = step_rows.unique(["run", "rank", "step", "warmup"], keep="last", maintain_order=True)
    world_fields = RecordedSteps._fields[1:]
    world_columns = {name: [getattr(recorded_run, name) for recorded_run in recorded_runs] for name in world_fields}
    rank_counts = pl.DataFrame(world_columns, schema=dict.fromkeys(world_columns, pl.Int64))
    rank_counts = rank_counts.with_row_index("run").cast(pl.Int64)
    timed_rows = _select_timed_rows(step_rows.join(rank_counts, "run", maintain_order="left")).drop(world_fields)
    return StepFrames(step_rows, timed_rows, _aggregate_world_steps(timed_rows, "run", "step"))


def split_rows_by_run(run_rows: pl.DataFrame, run_count: int) -> list[pl.DataFrame]:
    """Split a frame into one frame per run, without the column `run`. The column has sorted indexes from 0 to count - 1."""
    run_ends = np.searchsorted(run_rows["run"].to_numpy(), np.arange(run_count), "right").tolist()
    run_rows = run_rows.drop("run")
    return [run_rows.slice(run_start, run_end - run_start) for run_start, run_end in pairwise([0, *run_ends])]


def _select_timed_rows(step_rows: pl.DataFrame) -> pl.DataFrame:
    """The timed steps that every training rank recorded. Other steps are left out, because their slowest rank is not known.

    Ranks that share one model (tensor and pipeline parallel) all record the same units (samples or tokens). These units are
    divided among the ranks, so that the sum over the ranks is the number of units on which the step trained.
    """
    rows = step_rows.filter(~pl.col("warmup"), pl.col("rank") < pl.col("ranks"))
    lost_rank_count = (pl.col("step") >= pl.col("first_lost_step")).fill_null(value=False).cast(pl.Int64)
    complete_rows = rows.filter(pl.len().over("run", "step") == pl.col("ranks") - lost_rank_count).sort("run", "step", "rank")
    return complete_rows.with_columns(pl.col("units") * (pl.col("data_ranks") / pl.col("ranks")))


def select_unwatched_steps(timed_steps: pl.DataFrame) -> pl.DataFrame:
    """The timed steps that no instrument (such as the profiler) slowed down. Metrics of time and memory use these steps."""
    return timed_steps.filter(~pl.col("watched")) if timed_steps["watched"].any() else timed_steps


def join_world_steps(timed_steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of the world, one row per step: step_ms of the slowest rank, units of all ranks, loss of the global batch.

    The loss of a rank is the mean over the units of this rank. So for the loss of the global batch, the loss of each rank is
    weighted by the number of its units.
    """
    return _aggregate_world_steps(timed_steps, "step")


def select_undisturbed_steps(timed_steps: pl.DataFrame, world_steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of the world that no instrument slowed down. world_steps: all timed steps, returned if none was slowed."""
    return join_world_steps(select_unwatched_steps(timed_steps)) if timed_steps["watched"].any() else world_steps


def _aggregate_world_steps(timed_steps: pl.DataFrame, *key_columns: str) -> pl.DataFrame:
    # A rank without data has no loss, and neither has a step of a script that did not tell it.
    units_with_loss = pl.col("units").filter(pl.col("loss").is_not_null()).sum()
    weighted_mean_loss = (pl.col("loss") * pl.col("units")).sum() / units_with_loss
    batch_loss = pl.when(units_with_loss > 0).then(weighted_mean_loss).otherwise(None)
    return (
        timed_steps.group_by(key_columns)
        .agg(step_ms=pl.col("step_ms").max(), units=pl.col("units").sum(), loss=batch_loss, wall_s=pl.col("wall_s").max())
        .sort(key_columns)
    )


def sum_training_time_s(timed_steps: pl.DataFrame) -> dict[int, float]:
    """{number of a timed step: sum of the times of all timed steps up to its end, in seconds}, without warm-up and validation.

    In an imported run, whose log may have only each tenth step, a step stands for the steps before it, too.
    """
    world_steps = join_world_steps(timed_steps)
    represented_s = world_steps["step_ms"] * world_steps["step"].diff().fill_null(1) / 1000
    return dict(zip(world_steps["step"].to_list(), represented_s.cum_sum().to_list(), strict=True))


def find_timed_window(timed_steps: pl.DataFrame) -> tuple[float, float] | None:
    """The timed window of a run: (end of the first timed step, end of the last timed step), in seconds since the epoch.

    None if there is no timed step, or if both moments are equal.
    """
    if timed_steps.is_empty():
        return None
    wall_s = timed_steps["wall_s"].to_numpy()
    first_end_s, last_end_s = float(wall_s.min()), float(wall_s.max())
    return (first_end_s, last_end_s) if last_end_s > first_end_s else None
