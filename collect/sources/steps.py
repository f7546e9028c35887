"""Step records -> a frame, and the two views that every metric takes of it: timed steps, and the world's."""

from __future__ import annotations

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
}


def frame(ranks: dict[int, list[StepRecord]]) -> pl.DataFrame:
    """One row per rank and step, warm-up included. A step that a rank recorded twice counts once, as recorded last."""
    fields = [name for name in SCHEMA if name != "rank"]
    columns: dict[str, list[object]] = {name: [] for name in SCHEMA}
    for rank, records in ranks.items():
        columns["rank"] += [rank] * len(records)
        for name in fields:
            columns[name] += [getattr(record, name) for record in records]
    rows = pl.DataFrame(columns, schema=SCHEMA)
    return rows.unique(["rank", "step", "warmup"], keep="last", maintain_order=True)


def timed(steps: pl.DataFrame, ranks: int, data_ranks: int) -> pl.DataFrame:
    """The timed steps that every rank that trains recorded: a step with a rank missing has no slowest rank.

    Ranks that share one model (tensor and pipeline parallel) record the same units; here each has its part of them, so that
    their sum is what the step trained on.
    """
    rows = steps.filter(~pl.col("warmup"), pl.col("rank") < ranks)
    whole = rows.filter(pl.len().over("step") == ranks).sort("step", "rank")
    return whole.with_columns(pl.col("units") * (data_ranks / ranks)) if ranks else whole


def unwatched(timed_steps: pl.DataFrame) -> pl.DataFrame:
    """The timed steps that no instrument slowed down: what is said of times and memory is said of these."""
    return timed_steps.filter(~pl.col("watched"))


def of_world(timed_steps: pl.DataFrame) -> pl.DataFrame:
    """One row per step: step_ms of the slowest rank, units of all ranks, loss as the mean over the global batch.

    Each rank's loss is a mean over its own units, so the mean over the batch weighs it by them.
    """
    weighed = (pl.col("loss") * pl.col("units")).sum() / pl.col("units").sum()
    loss = pl.when(pl.col("units").sum() > 0).then(weighed).otherwise(None)
    return (
        timed_steps.group_by("step")
        .agg(step_ms=pl.col("step_ms").max(), units=pl.col("units").sum(), loss=loss, wall_s=pl.col("wall_s").max())
        .sort("step")
    )


def seconds_until(timed_steps: pl.DataFrame) -> dict[int, float]:
    """Step -> seconds of training up to its end: the slowest rank's step times, in which neither warm-up nor validation is."""
    world = of_world(timed_steps)
    return dict(zip(world["step"].to_list(), (world["step_ms"].cum_sum() / 1000).to_list(), strict=True))


def window(timed_steps: pl.DataFrame) -> tuple[float, float] | None:
    """(first, last) wall_s of the timed steps in seconds since the epoch, or None where they span no time."""
    if timed_steps.is_empty():
        return None
    first, last = timed_steps.select(first=pl.col("wall_s").min(), last=pl.col("wall_s").max()).row(0)
    return (first, last) if last > first else None
