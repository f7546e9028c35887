"""Do two ways of running the same work see the same losses: if not, their speeds are those of different work."""

from __future__ import annotations

import itertools

import msgspec
import polars as pl

from collect.likeness import differ_only_in_launcher, same_work
from collect.load import Loaded, LoadedCell
from collect.sources.steps import of_world


class LossComparison(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Two cells and the largest difference of their losses over equal repeats and steps.

    differ: `launcher`, or `strategy` for another strategy or rank count with an equal global batch. max_difference: absolute;
    relative: that difference over the mean of the two losses at that step. Absent where no step is in both.
    """

    differ: str
    one: str
    other: str
    runs: list[str]
    steps: int
    max_difference: float | None = None
    relative: float | None = None
    at_step: int | None = None


def compare(loaded: Loaded, baseline: str) -> list[LossComparison]:
    """Cells that differ only in launcher, pairwise; then cells against those of the baseline strategy."""
    found = []
    for one, other in itertools.combinations(loaded.cells, 2):
        if differ_only_in_launcher(one.cell, other.cell):
            found.append(between("launcher", one, other))
    for one, other in itertools.permutations(loaded.cells, 2):
        is_baseline = one.cell.strategy == baseline and (other.cell.strategy != baseline or other.cell.gpus > one.cell.gpus)
        if is_baseline and same_work(one.cell, other.cell):
            found.append(between("strategy", one, other))
    return [comparison for comparison in found if comparison.runs]


def between(differ: str, one: LoadedCell, other: LoadedCell) -> LossComparison:
    """Compare the repeats that both have completed."""
    theirs = {run.repeat: run for run in other.completed}
    runs: list[str] = []
    parts = []
    for run in one.completed:
        if run.repeat in theirs:
            parts.append(differences(run.timed, theirs[run.repeat].timed))
            runs += [run.run_id, theirs[run.repeat].run_id]
    comparison = LossComparison(differ=differ, one=one.id, other=other.id, runs=runs, steps=sum(part.height for part in parts))
    if comparison.steps:
        worst = pl.concat(parts).sort("difference", descending=True).row(0, named=True)
        comparison.max_difference, comparison.at_step = worst["difference"], worst["step"]
        comparison.relative = worst["difference"] / worst["size"] if worst["size"] else None
    return comparison


def differences(one: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """step, difference (absolute), size (mean magnitude) of the world's losses, for the steps that both frames have."""
    rows = of_world(one).join(of_world(other), on="step", suffix="_other").drop_nulls(["loss", "loss_other"])
    return rows.select(
        "step",
        difference=(pl.col("loss") - pl.col("loss_other")).abs(),
        size=(pl.col("loss").abs() + pl.col("loss_other").abs()) / 2,
    )
