"""Do two ways of running the same work see the same losses: if not, their speeds are those of different work."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import polars as pl

from collect.likeness import differ_only_in_launcher, families, same_work
from collect.load import Loaded, LoadedCell


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
    found = [
        between(differ, one, other)
        for differ, pairs in (("launcher", launchers), ("strategy", strategies))
        for one, other in sorted(pairs, key=lambda pair: (place[pair[0].id], place[pair[1].id]))
    ]
    return [comparison for comparison in found if comparison.runs]


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
    found = [worst for mine, their in pairs for worst in differences(mine.world, their.world)]
    runs = [run.run_id for pair in pairs for run in pair]
    comparison = LossComparison(differ=differ, one=one.id, other=other.id, runs=runs, steps=len(found))
    if found:
        worst = max(found, key=lambda one: one.difference)
        comparison.max_difference, comparison.at_step = worst.difference, worst.step
        comparison.relative = worst.difference / worst.size if worst.size else None
    return comparison


class Difference(NamedTuple):
    """Two losses at a step: how far they are apart, and the mean of their magnitudes."""

    step: int
    difference: float
    size: float


def differences(one: pl.DataFrame, other: pl.DataFrame) -> list[Difference]:
    """Of the world's losses, for the steps that both frames have."""
    theirs = dict(zip(other["step"].to_list(), other["loss"].to_list(), strict=True))
    pairs = ((step, loss, theirs.get(step)) for step, loss in zip(one["step"].to_list(), one["loss"].to_list(), strict=True))
    return [
        Difference(step, abs(mine - their), (abs(mine) + abs(their)) / 2)
        for step, mine, their in pairs
        if mine is not None and their is not None
    ]
