"""Compares the losses of cells that should do the same work. If their losses differ, the cells did different work."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from collect.findings.comparability import differ_only_in_launcher, families, same_work
from collect.reading.load import Loaded, LoadedCell


class LossComparison(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The largest difference between the losses of two cells, over the repeats and steps that both have.

    max_difference, relative and at_step are absent if the cells have no step in common.
    """

    differ: str  # `launcher`, or `strategy` (another strategy or number of ranks, with the same global batch size)
    one: str  # the id of the first cell
    other: str  # the id of the second cell
    runs: list[str]  # ids of the runs that were compared
    steps: int  # number of steps that were compared, over all repeats
    max_difference: float | None = None  # the largest absolute difference
    relative: float | None = None  # max_difference divided by the mean size of the two losses at this step
    at_step: int | None = None  # the step with the largest difference


def compare(loaded: Loaded, baseline: str) -> list[LossComparison]:
    """Compare the losses of each pair of cells that differ only in the launcher, then of each cell with its baseline cells."""
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
    """Whether two cells do the same work, and `other` has another strategy or more ranks than `one`."""
    another = other.cell.strategy != one.cell.strategy or other.cell.gpus > one.cell.gpus
    return another and same_work(one.cell, other.cell)


def between(differ: str, one: LoadedCell, other: LoadedCell) -> LossComparison:
    """Compare the losses of two cells in the repeats that both cells have completed. differ: as in `LossComparison`."""
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
    """The largest difference between the losses of two runs."""

    step: int  # the step with the largest difference
    difference: float  # the absolute difference of the two losses at this step
    size: float  # the mean of the absolute values of the two losses at this step
    steps: int  # number of steps that have a loss in both runs


def largest(one: pl.DataFrame, other: pl.DataFrame) -> LossDifference | None:
    """Find the largest difference between the losses of two runs; None if no step has a loss in both.

    one, other: frames with one row per step over all ranks (`LoadedRun.world`).
    """
    steps = one["step"].to_numpy()
    if not np.array_equal(steps, other["step"].to_numpy()):
        both = one.select("step", "loss").join(other.select("step", other="loss"), on="step", maintain_order="left")
        steps, one, other = both["step"].to_numpy(), both, both.select(loss="other")
    mine, theirs = one["loss"].to_numpy(), other["loss"].to_numpy()
    # A missing loss is rare. Without this check, the filter below would take most of the time of the function.
    if one["loss"].null_count() or other["loss"].null_count():
        known = (one["loss"].is_not_null() & other["loss"].is_not_null()).to_numpy()
        steps, mine, theirs = steps[known], mine[known], theirs[known]
    if not len(mine):
        return None
    apart = np.abs(mine - theirs)
    at = int(apart.argmax())
    size = float((abs(mine[at]) + abs(theirs[at])) / 2)
    return LossDifference(int(steps[at]), float(apart[at]), size, len(mine))
