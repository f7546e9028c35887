"""Compares the losses of cells that should do the same work: if the losses differ, the cells did different work."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from collect.findings.comparability import differ_only_in_launcher, families, same_work
from collect.loading.load import Loaded, LoadedCell


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
    launchers: list[tuple[LoadedCell, LoadedCell]] = []
    strategies: list[tuple[LoadedCell, LoadedCell]] = []
    for family in families(loaded.cells):
        launchers += (pair for pair in itertools.combinations(family, 2) if _differ_only_in_launcher(*pair))
        baselines = [cell for cell in family if cell.cell.strategy == baseline]
        strategies += (pair for pair in itertools.product(baselines, family) if _same_work(*pair))
    place = {cell.id: place for place, cell in enumerate(loaded.cells)}
    comparisons = [
        between(differ, one, other)
        for differ, pairs in (("launcher", launchers), ("strategy", strategies))
        for one, other in sorted(pairs, key=lambda pair: (place[pair[0].id], place[pair[1].id]))
    ]
    return [comparison for comparison in comparisons if comparison.runs]


def _differ_only_in_launcher(one: LoadedCell, other: LoadedCell) -> bool:
    return differ_only_in_launcher(one.cell, other.cell)


def _same_work(one: LoadedCell, other: LoadedCell) -> bool:
    """Whether the first, of the baseline strategy, does what the other does with another strategy or on more ranks."""
    another = other.cell.strategy != one.cell.strategy or other.cell.gpus > one.cell.gpus
    return another and same_work(one.cell, other.cell)


def between(differ: str, one: LoadedCell, other: LoadedCell) -> LossComparison:
    """Compare the repeats that both have completed."""
    theirs = {run.repeat: run for run in other.completed}
    pairs = [(run, theirs[run.repeat]) for run in one.completed if run.repeat in theirs]
    differences = [difference for mine, their in pairs if (difference := largest(mine.world, their.world)) is not None]
    runs = [run.run_id for pair in pairs for run in pair]
    comparison = LossComparison(
        differ=differ, one=one.id, other=other.id, runs=runs, steps=sum(each.steps for each in differences)
    )
    if differences:
        worst = max(differences, key=lambda each: each.difference)
        comparison.max_difference, comparison.at_step = worst.difference, worst.step
        comparison.relative = worst.difference / worst.size if worst.size else None
    return comparison


class LossDifference(NamedTuple):
    """The two losses that are farthest apart, at which step, the mean of their magnitudes, and how many steps both have."""

    step: int
    difference: float
    size: float
    steps: int


def largest(one: pl.DataFrame, other: pl.DataFrame) -> LossDifference | None:
    """Of the world's losses; None where no step has both."""
    steps = one["step"].to_numpy()
    if not np.array_equal(steps, other["step"].to_numpy()):
        both = one.select("step", "loss").join(other.select("step", other="loss"), on="step", maintain_order="left")
        steps, one, other = both["step"].to_numpy(), both, both.select(loss="other")
    mine, theirs = one["loss"].to_numpy(), other["loss"].to_numpy()
    if one["loss"].null_count() or other["loss"].null_count():  # as of few: to look for each takes longer than all the rest
        known = (one["loss"].is_not_null() & other["loss"].is_not_null()).to_numpy()
        steps, mine, theirs = steps[known], mine[known], theirs[known]
    if not len(mine):
        return None
    apart = np.abs(mine - theirs)
    at = int(apart.argmax())
    size = float((abs(mine[at]) + abs(theirs[at])) / 2)
    return LossDifference(int(steps[at]), float(apart[at]), size, len(mine))
