"""Computes the cost of each instrument: its time between steps, and how much longer steps take while it observes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median

import msgspec
import polars as pl

from collect.loading.loaded_run import LoadedRun
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.sources.steps import join_world_steps, select_undisturbed

LOST_WORKER = "lost_worker"  # it ends a rank on purpose and measures nothing, so it has no cost


class InstrumentCost(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The cost of one instrument in one cell, as the mean over completed runs."""

    cell: str
    instrument: str
    """Name of the instrument."""
    n: int
    """Number of completed runs."""
    cost_s: float
    """The time that the instrument took between steps, in seconds by the clock of rank 0."""
    watched_steps: int
    """Number of steps that the instrument observed; they are not used for metrics of time or memory."""
    step_ratio: float | None = None
    """Median time of the observed steps divided by the median time of the steps that no instrument observed; absent if either
    of the two is not known."""


def compute_instrument_costs(loaded: LoadedMatrix) -> list[InstrumentCost]:
    """The cost of each instrument in each cell, as the mean over the completed runs in which the instrument was on."""
    all_costs = []
    for cell in loaded.cells:
        runs_by_instrument: dict[str, list[LoadedRun]] = {}
        for run in cell.completed_runs:
            for name in run.result.instruments if run.result else {}:
                if name == LOST_WORKER:
                    continue
                runs_by_instrument.setdefault(name, []).append(run)
        for name, runs in runs_by_instrument.items():
            costs_s = [msgspec.convert(_instrument_record(run, name)["cost_s"], float) for run in runs]
            ratios = [ratio for run in runs if (ratio := _compute_step_ratio(run, _watched_steps(run, name))) is not None]
            all_costs.append(
                InstrumentCost(
                    cell=cell.id,
                    instrument=name,
                    n=len(runs),
                    cost_s=mean(costs_s),
                    watched_steps=max(len(_watched_steps(run, name)) for run in runs),
                    step_ratio=mean(ratios) if ratios else None,
                )
            )
    return all_costs


def describe_instrument_differences(families: Iterable[Sequence[LoadedCell]]) -> list[str]:
    """Find the groups of comparable cells whose instruments differ, and say which steps an instrument observed in each cell.

    families: the groups (`comparability.group_families`). Returns texts such as `CELL (profile: steps 3 and 4)`.
    """
    texts = []
    for family in families:
        if len({repr(cell.cell.instruments) for cell in family if cell.completed_runs}) < 2:
            continue
        for cell in family:
            steps_by_instrument = {
                name: steps
                for run in cell.completed_runs
                for name in (run.result.instruments if run.result else ())
                if (steps := _watched_steps(run, name))
            }
            if steps_by_instrument:
                observed_text = "; ".join(f"{name}: {_format_steps(steps)}" for name, steps in steps_by_instrument.items())
                texts.append(f"{cell.id} ({observed_text})")
    return texts


def _format_steps(steps: list[int]) -> str:
    """Step numbers in words: `step 2`, `steps 3 and 4`, `steps 3 to 7`. steps: the numbers in ascending order."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"steps {steps[0]} {'and' if len(steps) == 2 else 'to'} {steps[-1]}"


def _instrument_record(run: LoadedRun, name: str) -> dict[str, object]:
    assert run.result is not None
    return run.result.instruments[name]


def _watched_steps(run: LoadedRun, name: str) -> list[int]:
    return msgspec.convert(_instrument_record(run, name).get("watched_steps", []), list[int])


def _compute_step_ratio(run: LoadedRun, watched_steps: list[int]) -> float | None:
    other_ms = select_undisturbed(run.timed_steps, run.world_steps)["step_ms"]
    watched_ms = join_world_steps(run.timed_steps.filter(pl.col("step").is_in(watched_steps)))["step_ms"]
    if other_ms.is_empty() or watched_ms.is_empty():
        return None
    ratio: float = median(watched_ms.to_list()) / median(other_ms.to_list())
    return ratio
