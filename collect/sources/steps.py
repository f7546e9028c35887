"""Turns step records into frames: all steps, the timed steps of each rank, and the timed steps of the world (all ranks)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from shardlab.runs.record import StepRecord

COLUMN_TYPES: Mapping[str, Any] = {
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


def build_step_frames(run: RecordedSteps) -> StepFrames:
    """The frames of the steps of one run."""
    return StepFrames(*(rows.drop("run") for rows in build_step_frames_of_runs([run])))


def build_step_frames_of_runs(runs: Sequence[RecordedSteps]) -> StepFrames:
    """The frames of many runs together, because making a frame takes about as long for one run as for a hundred.

    The frames have a column `run`: the index of the run in `runs`.
    """
    columns: dict[str, list[object]] = {name: [] for name in ("run", "rank", *StepRecord.__struct_fields__)}
    for run_index, run in enumerate(runs):
        for rank, records in run.steps.items():
            columns["run"] += [run_index] * len(records)
            columns["rank"] += [rank] * len(records)
            for name, values in zip(StepRecord.__struct_fields__, zip(*map(msgspec.structs.astuple, records))):
                columns[name] += values
    column_types = {"run": pl.Int64, **COLUMN_TYPES}
    rows = pl.DataFrame({name: columns[name] for name in column_types}, schema=column_types)
    rows = rows.unique(["run", "rank", "step", "warmup"], keep="last", maintain_order=True)
    world_fields = RecordedSteps._fields[1:]
    world_columns = {name: [getattr(run, name) for run in runs] for name in world_fields}
    rank_counts = pl.DataFrame(world_columns, schema=dict.fromkeys(world_columns, pl.Int64))
    rank_counts = rank_counts.with_row_index("run").cast(pl.Int64)
    timed_rows = _select_timed_rows(rows.join(rank_counts, "run", maintain_order="left")).drop(world_fields)
    return StepFrames(rows, timed_rows, _aggregate_world(timed_rows, "run", "step"))


def split_by_run(rows: pl.DataFrame, count: int) -> list[pl.DataFrame]:
    """Split a frame into one frame per run, without the column `run`. The column has sorted indexes from 0 to count - 1."""
    run_ends = np.searchsorted(rows["run"].to_numpy(), np.arange(count), "right").tolist()
    rows = rows.drop("run")
    return [rows.slice(start, end - start) for start, end in pairwise([0, *run_ends])]


def _select_timed_rows(steps: pl.DataFrame) -> pl.DataFrame:
    """The timed steps that every training rank recorded. Other steps are left out, because their slowest rank is not known.

    Ranks that share one model (tensor and pipeline parallel) all record the same units (samples or tokens). These units are
    divided among the ranks, so that the sum over the ranks is the number of units on which the step trained.
    """
    rows = steps.filter(~pl.col("warmup"), pl.col("rank") < pl.col("ranks"))
    lost_ranks = (pl.col("step") >= pl.col("first_lost_step")).fill_null(value=False).cast(pl.Int64)
    complete_rows = rows.filter(pl.len().over("run", "step") == pl.col("ranks") - lost_ranks).sort("run", "step", "rank")
    return complete_rows.with_columns(pl.col("units") * (pl.col("data_ranks") / pl.col("ranks")))


def select_unwatched(timed_steps: pl.DataFrame) -> pl.DataFrame:
    """The timed steps that no instrument (such as the profiler) slowed down. Metrics of time and memory use these steps."""
    return timed_steps.filter(~pl.col("watched")) if timed_steps["watched"].any() else timed_steps


def join_world_steps(timed_steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of the world, one row per step: step_ms of the slowest rank, units of all ranks, loss of the global batch.

    The loss of a rank is the mean over the units of this rank. So for the loss of the global batch, the loss of each rank is
    weighted by the number of its units.
    """
    return _aggregate_world(timed_steps, "step")


def select_undisturbed(timed_steps: pl.DataFrame, world: pl.DataFrame) -> pl.DataFrame:
    """The steps of the world that no instrument slowed down. world: all timed steps, returned unchanged if none was slowed."""
    return join_world_steps(select_unwatched(timed_steps)) if timed_steps["watched"].any() else world


def _aggregate_world(timed_steps: pl.DataFrame, *keys: str) -> pl.DataFrame:
    # A rank without data has no loss, and neither has a step of a script that did not tell it.
    units_with_loss = pl.col("units").filter(pl.col("loss").is_not_null()).sum()
    weighted_mean_loss = (pl.col("loss") * pl.col("units")).sum() / units_with_loss
    loss = pl.when(units_with_loss > 0).then(weighted_mean_loss).otherwise(None)
    return (
        timed_steps.group_by(keys)
        .agg(step_ms=pl.col("step_ms").max(), units=pl.col("units").sum(), loss=loss, wall_s=pl.col("wall_s").max())
        .sort(keys)
    )


def sum_training_seconds(timed_steps: pl.DataFrame) -> dict[int, float]:
    """{number of a timed step: sum of the times of all timed steps up to its end, in seconds}, without warm-up and validation.

    In an imported run, whose log may have only each tenth step, a step stands for the steps before it, too.
    """
    world = join_world_steps(timed_steps)
    seconds = world["step_ms"] * world["step"].diff().fill_null(1) / 1000
    return dict(zip(world["step"].to_list(), seconds.cum_sum().to_list(), strict=True))


def find_timed_window(timed_steps: pl.DataFrame) -> tuple[float, float] | None:
    """The timed window of a run: (end of the first timed step, end of the last timed step), in seconds since the epoch.

    None if there is no timed step, or if both moments are equal.
    """
    if timed_steps.is_empty():
        return None
    wall_s = timed_steps["wall_s"].to_numpy()
    first, last = float(wall_s.min()), float(wall_s.max())
    return (first, last) if last > first else None
