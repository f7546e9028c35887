"""Finds how far the losses of cells that should do the same work differ."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from collect.findings.comparability import differ_only_in_launcher, group_families, is_same_work_expected
from collect.reading.load import LoadedCell, LoadedMatrix


class LossComparison(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The largest difference between the losses of two cells, over the repeats and steps that both have.

    max_difference, relative and at_step are absent if the cells have no step in common.
    """

    differ: str
    """`launcher`, or `strategy` (another strategy or number of ranks, with the same global batch size)."""
    one: str
    """The id of the first cell."""
    other: str
    """The id of the second cell."""
    runs: list[str]
    """Ids of the runs that were compared."""
    steps: int
    """Number of steps that were compared, over all repeats."""
    max_difference: float | None = None
    """The largest absolute difference."""
    relative: float | None = None
    """max_difference divided by the mean size of the two losses at this step."""
    at_step: int | None = None
    """The step with the largest difference."""


def compare_losses(loaded: LoadedMatrix, baseline: str) -> list[LossComparison]:
    """Compare the losses of each pair of cells that differ only in the launcher, then of each cell with its baseline cells."""
    launcher_pairs: list[tuple[LoadedCell, LoadedCell]] = []
    strategy_pairs: list[tuple[LoadedCell, LoadedCell]] = []
    for family in group_families(loaded.cells):
        launcher_pairs += (pair for pair in itertools.combinations(family, 2) if _is_launcher_pair(*pair))
        baselines = [cell for cell in family if cell.cell.strategy == baseline]
        strategy_pairs += (pair for pair in itertools.product(baselines, family) if _is_strategy_pair(*pair))
    position_by_cell = {cell.id: position_by_cell for position_by_cell, cell in enumerate(loaded.cells)}
    comparisons = [
        compare_pair_losses(difference_kind, cell, other)
        for difference_kind, cell_pairs in (("launcher", launcher_pairs), ("strategy", strategy_pairs))
        for cell, other in sorted(cell_pairs, key=lambda pair: (position_by_cell[pair[0].id], position_by_cell[pair[1].id]))
    ]
    return [comparison for comparison in comparisons if comparison.runs]


def _is_launcher_pair(cell: LoadedCell, other: LoadedCell) -> bool:
    return differ_only_in_launcher(cell.cell, other.cell)


def _is_strategy_pair(cell: LoadedCell, other: LoadedCell) -> bool:
    """Whether two cells do the same work, and `other` has another strategy or more ranks than `cell`."""
    is_other_setup = other.cell.strategy != cell.cell.strategy or other.cell.gpus > cell.cell.gpus
    return is_other_setup and is_same_work_expected(cell.cell, other.cell)


def compare_pair_losses(differ: str, cell: LoadedCell, other: LoadedCell) -> LossComparison:
    """Compare the losses of two cells in the repeats that both cells have completed. differ: as in `LossComparison`."""
    other_run_by_repeat = {run.repeat: run for run in other.completed_runs}
    run_pairs = [(run, other_run_by_repeat[run.repeat]) for run in cell.completed_runs if run.repeat in other_run_by_repeat]
    differences = [
        difference
        for run, other_run in run_pairs
        if (difference := find_largest_loss_difference(run.world_steps, other_run.world_steps)) is not None
    ]
    runs = [run.run_id for pair in run_pairs for run in pair]
    comparison = LossComparison(
        differ=differ, one=cell.id, other=other.id, runs=runs, steps=sum(difference.step_count for difference in differences)
    )
    if differences:
        largest = max(differences, key=lambda loss_difference: loss_difference.absolute_difference)
        comparison.max_difference, comparison.at_step = largest.absolute_difference, largest.step
        comparison.relative = largest.absolute_difference / largest.mean_absolute_loss if largest.mean_absolute_loss else None
    return comparison


class LossDifference(NamedTuple):
    """The largest difference between the losses of two runs."""

    step: int
    """The step with the largest difference."""
    absolute_difference: float
    """The absolute difference of the two losses at this step."""
    mean_absolute_loss: float
    """The mean of the absolute values of the two losses at this step."""
    step_count: int
    """Number of steps that have a loss in both runs."""


def find_largest_loss_difference(world_steps: pl.DataFrame, other_world_steps: pl.DataFrame) -> LossDifference | None:
    """Find the largest difference between the losses of two runs; None if no step has a loss in both.

    world_steps, other_world_steps: frames with one row per step over all ranks (`LoadedRun.world_steps`).
    """
    steps = world_steps["step"].to_numpy()
    if not np.array_equal(steps, other_world_steps["step"].to_numpy()):
        other_steps = other_world_steps.select("step", other="loss")
        joined_steps = world_steps.select("step", "loss").join(other_steps, on="step", maintain_order="left")
        steps, world_steps, other_world_steps = joined_steps["step"].to_numpy(), joined_steps, joined_steps.select(loss="other")
    losses, other_losses = world_steps["loss"].to_numpy(), other_world_steps["loss"].to_numpy()
    # A missing loss is rare. Without this check, the filter below would take most of the time of the function.
    if world_steps["loss"].null_count() or other_world_steps["loss"].null_count():
        has_both = (world_steps["loss"].is_not_null() & other_world_steps["loss"].is_not_null()).to_numpy()
        steps, losses, other_losses = steps[has_both], losses[has_both], other_losses[has_both]
    if not len(losses):
        return None
    absolute_differences = np.abs(losses - other_losses)
    index = int(absolute_differences.argmax())
    mean_absolute_loss = float((abs(losses[index]) + abs(other_losses[index])) / 2)
    return LossDifference(int(steps[index]), float(absolute_differences[index]), mean_absolute_loss, len(losses))
