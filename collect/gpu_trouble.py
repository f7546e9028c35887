"""Finds runs whose GPUs were shared with other processes or throttled. Their times do not show how fast a strategy is."""

from __future__ import annotations

import polars as pl

from collect.load import LoadedRun
from collect.sources.samples import within
from collect.sources.steps import window
from shardlab.nvml import POWER_CAP

LEAST_SHARE = 0.05  # of a GPU's samples: a slowdown of a moment says nothing of a run


def gpu_trouble(run: LoadedRun) -> str:
    """A text that names the GPUs of the run that were shared or throttled while steps were timed, in 5 % of the
    samples or more; '' if there are none.

    A GPU at its power limit does not count as throttled: many GPUs reach the limit at full load. '' also if telemetry does not
    record processes and clocks, or if the result does not name the run's GPUs.
    """
    if run.result is None or run.run is None or not run.result.gpus or (span := window(run.timed)) is None:
        return ""
    seen = within(run.samples.gpus.filter(pl.col("uuid").is_in(run.result.gpus)), span)
    own = -(-run.run.cell.gpus // len(run.result.gpus))  # ranks of this run on each GPU; each rank is one process
    found = []
    if shared := _named(seen.filter(pl.col("processes") > own), seen):
        found.append(f"other processes computed on {shared}")
    slowed = seen.explode("throttled").drop_nulls("throttled").filter(pl.col("throttled") != POWER_CAP)
    for reason in sorted(slowed["throttled"].unique()):
        if named := _named(slowed.filter(pl.col("throttled") == reason), seen):
            found.append(f"{named} had lowered clocks ({reason})")
    return "; ".join(found)


def _named(rows: pl.DataFrame, seen: pl.DataFrame) -> str:
    """The GPUs with at least LEAST_SHARE of their samples in `rows`."""
    samples = dict(seen["uuid"].value_counts().iter_rows())
    return ", ".join(
        sorted(uuid for uuid, count in rows["uuid"].value_counts().iter_rows() if count >= LEAST_SHARE * samples[uuid])
    )
