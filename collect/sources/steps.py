"""Step records -> a frame, and the two views that every metric takes of it: timed steps, and the world's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from shardlab.record import StepRecord

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


class Recorded(NamedTuple):
    """The step records of a run by rank, and how many ranks its world has: all that train, and those that share its data."""

    steps: Mapping[int, Sequence[StepRecord]]
    ranks: int = 0
    data_ranks: int = 0


class Frames(NamedTuple):
    """every: all recorded steps of a run; timed: the timed ones that every rank recorded; world: those, one row per step."""

    every: pl.DataFrame
    timed: pl.DataFrame
    world: pl.DataFrame


def frame(ranks: Mapping[int, Sequence[StepRecord]]) -> pl.DataFrame:
    """One row per rank and step, warm-up included. A step that a rank recorded twice counts once, as recorded last."""
    return frames(Recorded(ranks)).every


def frames(run: Recorded) -> Frames:
    """Those of one run."""
    return Frames(*(rows.drop("run") for rows in of_runs([run])))


def of_runs(runs: Sequence[Recorded]) -> Frames:
    """Those of many runs, as a frame costs about the same for one run as for a hundred. Column `run`: its place among them."""
    columns: dict[str, list[object]] = {name: [] for name in ("run", "rank", *StepRecord.__struct_fields__)}
    for number, run in enumerate(runs):
        for rank, records in run.steps.items():
            columns["run"] += [number] * len(records)
            columns["rank"] += [rank] * len(records)
            for name, values in zip(StepRecord.__struct_fields__, zip(*map(msgspec.structs.astuple, records))):
                columns[name] += values
    schema = {"run": pl.Int64, **SCHEMA}
    rows = pl.DataFrame({name: columns[name] for name in schema}, schema=schema)
    rows = rows.unique(["run", "rank", "step", "warmup"], keep="last", maintain_order=True)
    worlds = {"ranks": [run.ranks for run in runs], "data_ranks": [run.data_ranks for run in runs]}
    sizes = pl.DataFrame(worlds, schema=dict.fromkeys(worlds, pl.Int64)).with_row_index("run").cast(pl.Int64)
    whole = _timed(rows.join(sizes, "run", maintain_order="left")).drop("ranks", "data_ranks")
    return Frames(rows, whole, _world(whole, "run", "step"))


def by_run(rows: pl.DataFrame, count: int) -> list[pl.DataFrame]:
    """The parts of a frame whose column `run` counts from 0 to count - 1 and is ordered, without that column."""
    ends = np.searchsorted(rows["run"].to_numpy(), np.arange(count), "right").tolist()
    rows = rows.drop("run")
    return [rows.slice(start, end - start) for start, end in pairwise([0, *ends])]


def timed(steps: pl.DataFrame, ranks: int, data_ranks: int) -> pl.DataFrame:
    """The timed steps that every rank that trains recorded: a step with a rank missing has no slowest rank.

    Ranks that share one model (tensor and pipeline parallel) record the same units; here each has its part of them, so that
    their sum is what the step trained on.
    """
    rows = steps.with_columns(run=pl.lit(0, pl.Int64), ranks=pl.lit(ranks), data_ranks=pl.lit(data_ranks))
    return _timed(rows).drop("run", "ranks", "data_ranks")


def _timed(steps: pl.DataFrame) -> pl.DataFrame:
    rows = steps.filter(~pl.col("warmup"), pl.col("rank") < pl.col("ranks"))
    whole = rows.filter(pl.len().over("run", "step") == pl.col("ranks")).sort("run", "step", "rank")
    return whole.with_columns(pl.col("units") * (pl.col("data_ranks") / pl.col("ranks")))


def unwatched(timed_steps: pl.DataFrame) -> pl.DataFrame:
    """The timed steps that no instrument slowed down: what is said of times and memory is said of these."""
    return timed_steps.filter(~pl.col("watched")) if timed_steps["watched"].any() else timed_steps


def of_world(timed_steps: pl.DataFrame) -> pl.DataFrame:
    """One row per step: step_ms of the slowest rank, units of all ranks, loss as the mean over the global batch.

    Each rank's loss is a mean over its own units, so the mean over the batch weighs it by them.
    """
    return _world(timed_steps, "step")


def undisturbed(timed_steps: pl.DataFrame, world: pl.DataFrame) -> pl.DataFrame:
    """The world's steps that no instrument slowed down; `world`: all of its steps, which they are as a rule."""
    return of_world(unwatched(timed_steps)) if timed_steps["watched"].any() else world


def _world(timed_steps: pl.DataFrame, *keys: str) -> pl.DataFrame:
    weighed = (pl.col("loss") * pl.col("units")).sum() / pl.col("units").sum()
    loss = pl.when(pl.col("units").sum() > 0).then(weighed).otherwise(None)
    return (
        timed_steps.group_by(keys)
        .agg(step_ms=pl.col("step_ms").max(), units=pl.col("units").sum(), loss=loss, wall_s=pl.col("wall_s").max())
        .sort(keys)
    )


def seconds_until(timed_steps: pl.DataFrame) -> dict[int, float]:
    """Step -> seconds of training up to its end: the slowest rank's step times, in which neither warm-up nor validation is."""
    world = of_world(timed_steps)
    return dict(zip(world["step"].to_list(), (world["step_ms"].cum_sum() / 1000).to_list(), strict=True))


def window(timed_steps: pl.DataFrame) -> tuple[float, float] | None:
    """(first, last) wall_s of the timed steps in seconds since the epoch, or None where they span no time."""
    if timed_steps.is_empty():
        return None
    wall_s = timed_steps["wall_s"].to_numpy()
    first, last = float(wall_s.min()), float(wall_s.max())
    return (first, last) if last > first else None
