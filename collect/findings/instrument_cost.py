"""Computes the cost of each instrument: its time between steps, and how much longer steps take while it observes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median

import msgspec
import polars as pl

from collect.loading.loaded_run import LoadedRun
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.sources.steps import join_world_steps, select_undisturbed_steps

LOST_WORKER_INSTRUMENT = "lost_worker"  # it ends a rank on purpose and measures nothing, so it has no cost


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
    instrument_costs = []
    for cell in loaded.cells:
        runs_by_instrument: dict[str, list[LoadedRun]] = {}
        for run in cell.completed_runs:
            for name in run.result.instruments if run.result else {}:
                if name == LOST_WORKER_INSTRUMENT:
                    continue
                runs_by_instrument.setdefault(name, []).append(run)
        for name, runs in runs_by_instrument.items():
            costs_s = [msgspec.convert(_get_instrument_record(run, name)["cost_s"], float) for run in runs]
            ratios = [ratio for run in runs if (ratio := _compute_step_ratio(run, _read_watched_steps(run, name))) is not None]
            instrument_costs.append(
                InstrumentCost(
                    cell=cell.id,
                    instrument=name,
                    n=len(runs),
                    cost_s=mean(costs_s),
                    watched_steps=max(len(_read_watched_steps(run, name)) for run in runs),
                    step_ratio=mean(ratios) if ratios else None,
                )
            )
    return instrument_costs


def describe_instrument_differences(families: Iterable[Sequence[LoadedCell]]) -> list[str]:
    """Find the groups of comparable cells whose instruments differ, and say which steps an instrument observed in each cell.

    families: the groups (`comparability.group_families`). Returns texts such as `CELL (profile: steps 3 and 4)`.
    """
    cell_texts = []
    for family in families:
        if len({repr(cell.cell.instruments) for cell in family if cell.completed_runs}) < 2:
            continue
        for cell in family:
            steps_by_instrument = {
                name: steps
                for run in cell.completed_runs
                for name in (run.result.instruments if run.result else ())
                if (steps := _read_watched_steps(run, name))
            }
            if steps_by_instrument:
                observed_text = "; ".join(f"{name}: {_format_steps(steps)}" for name, steps in steps_by_instrument.items())
                cell_texts.append(f"{cell.id} ({observed_text})")
    return cell_texts


def _format_steps(step_numbers: list[int]) -> str:
    """Step numbers in words: `step 2`, `steps 3 and 4`, `steps 3 to 7`. step_numbers: the numbers in ascending order."""
    if len(step_numbers) == 1:
        return f"step {step_numbers[0]}"
    return f"steps {step_numbers[0]} {'and' if len(step_numbers) == 2 else 'to'} {step_numbers[-1]}"


def _get_instrument_record(run: LoadedRun, instrument: str) -> dict[str, object]:
    assert run.result is not None
    return run.result.instruments[instrument]


def _read_watched_steps(run: LoadedRun, instrument: str) -> list[int]:
    return msgspec.convert(_get_instrument_record(run, instrument).get("watched_steps", []), list[int])


def _compute_step_ratio(run: LoadedRun, watched_steps: list[int]) -> float | None:
    undisturbed_ms = select_undisturbed_steps(run.timed_steps, run.world_steps)["step_ms"]
    watched_ms = join_world_steps(run.timed_steps.filter(pl.col("step").is_in(watched_steps)))["step_ms"]
    if undisturbed_ms.is_empty() or watched_ms.is_empty():
        return None
    step_ratio: float = median(watched_ms.to_list()) / median(undisturbed_ms.to_list())
    return step_ratio
