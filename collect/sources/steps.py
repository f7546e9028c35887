"""Turns step records into frames: all steps, the timed steps of each rank, and the timed steps of the world (all ranks)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from shardlab.runs.record import StepRecord

SCHEMA = {
    "rank": pl.Int64,
    "step": pl.Int64,
    "warmup": pl.Boolean,
    "watched": pl.Boolean,
    "t_s": pl.Float64,
    "wall_s": pl.Float64,
    "loss": pl.Float64,
    "units": pl.Int64,
    "step_ms": pl.Float64,
    "data_ms": pl.Float64,
    "forward_ms": pl.Float64,
    "backward_ms": pl.Float64,
    "optimizer_ms": pl.Float64,
    "allocated_bytes": pl.Int64,
    "reserved_bytes": pl.Int64,
    "rss_bytes": pl.Int64,
    "cpu_s": pl.Float64,
    "disk_read_bytes": pl.Int64,
    "disk_write_bytes": pl.Int64,
}


class RecordedSteps(NamedTuple):
    """The step records of a run by rank, and the number of ranks."""

    steps: Mapping[int, Sequence[StepRecord]]
    ranks: int = 0
    """The number of ranks that train."""
    data_ranks: int = 0
    """The number of ranks that get different data; it is smaller than `ranks` if several ranks share one model (tensor and
    pipeline parallel)."""
    lost_from: int | None = None
    """The first timed step that one rank did not make because the cell ended its process on purpose; None: no rank."""


class Frames(NamedTuple):
    """The steps of a run as frames."""

    all_steps: pl.DataFrame
    """All recorded steps, one row per rank and step, including warm-up."""
    timed: pl.DataFrame
    """The timed steps that every rank recorded, one row per rank and step. A rank that the cell ended on purpose is not missing
    in the steps after its end."""
    world: pl.DataFrame
    """The same timed steps, joined over all ranks, one row per step."""


def build_step_frames(run: RecordedSteps) -> Frames:
    """The frames of the steps of one run."""
    return Frames(*(rows.drop("run") for rows in build_step_frames_of_runs([run])))


def build_step_frames_of_runs(runs: Sequence[RecordedSteps]) -> Frames:
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
    schema = {"run": pl.Int64, **SCHEMA}
    rows = pl.DataFrame({name: columns[name] for name in schema}, schema=schema)
    rows = rows.unique(["run", "rank", "step", "warmup"], keep="last", maintain_order=True)
    names = RecordedSteps._fields[1:]
    world_columns = {name: [getattr(run, name) for run in runs] for name in names}
    sizes = pl.DataFrame(world_columns, schema=dict.fromkeys(world_columns, pl.Int64)).with_row_index("run").cast(pl.Int64)
    timed_rows = _select_timed_rows(rows.join(sizes, "run", maintain_order="left")).drop(names)
    return Frames(rows, timed_rows, _aggregate_world(timed_rows, "run", "step"))


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
    lost_ranks = (pl.col("step") >= pl.col("lost_from")).fill_null(value=False).cast(pl.Int64)
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
    """The steps of the world that no instrument slowed down.

    world: all timed steps of the world. In most runs no instrument slowed down any step, and `world` is returned unchanged.
    """
    return join_world_steps(select_unwatched(timed_steps)) if timed_steps["watched"].any() else world


def _aggregate_world(timed_steps: pl.DataFrame, *keys: str) -> pl.DataFrame:
    # A rank without data has no loss, and neither has a step of a script that did not tell it.
    units_with_loss = pl.col("units").filter(pl.col("loss").is_not_null()).sum()
    weighed = (pl.col("loss") * pl.col("units")).sum() / units_with_loss
    loss = pl.when(units_with_loss > 0).then(weighed).otherwise(None)
    return (
        timed_steps.group_by(keys)
        .agg(step_ms=pl.col("step_ms").max(), units=pl.col("units").sum(), loss=loss, wall_s=pl.col("wall_s").max())
        .sort(keys)
    )


def seconds_until(timed_steps: pl.DataFrame) -> dict[int, float]:
    """The seconds of training up to the end of each timed step: {number of a step: sum of the times of all timed steps so far}.

    The time of a step is the time of its slowest rank. Warm-up and validation do not count. In an imported run, whose log may
    have only each tenth step, a step stands for the steps before it, too.
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
