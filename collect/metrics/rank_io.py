"""Metrics of the bytes that ranks read from storage and wrote to it while steps were timed, as the kernel counts them."""

from __future__ import annotations

from functools import partial

import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, Reads


def _sum_rank_growth(run: LoadedRun, counter_column: str) -> Quantity | None:
    """The growth of `counter_column` from the first to the last timed step, summed over all ranks; None if a step record has no
    `counter_column`."""
    if run.timed_steps.is_empty() or run.timed_steps[counter_column].null_count():
        return None
    rank_growths = run.timed_steps.group_by("rank").agg(pl.col(counter_column).last() - pl.col(counter_column).first())
    if (rank_growths[counter_column] < 0).any():  # a rank was restarted, so its counter began at 0 again
        return None
    return Quantity(int(rank_growths[counter_column].sum()), "bytes")


METRICS = tuple(
    Metric(
        name=f"rank_{direction}_bytes",
        of_all_steps=True,
        unit="bytes",
        direction="neither",
        definition=f"Bytes that all ranks together {verb} {preposition} storage, NFS included, between their first and "
        "their last timed step. What the page cache has is not read from storage.",
        of_run=partial(_sum_rank_growth, counter_column=counter_column_name),
        reads=Reads(steps="timed"),
    )
    for direction, verb, preposition, counter_column_name in (
        ("read", "read", "from", "disk_read_bytes"),
        ("written", "wrote", "to", "disk_write_bytes"),
    )
)
