"""The effects of faults on purpose: how long other ranks wait for a slowed rank, and what a cell loses with a lost worker."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec
import polars as pl

from collect.findings.columns import map_cells_to_labels
from collect.findings.comparability import make_key_without_faults
from collect.findings.row import CellRow
from collect.loading.loaded_run import LoadedRun
from collect.metrics.rank_times import measure_waiting_by_rank
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.timeline.timeline import find_straggler

FAULT_REMARK = (
    "a fault on purpose (instruments.straggler, instruments.lost_worker), so the figures are not those of an ordinary run: {}"
)


class StragglerEffect(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with a rank that is slowed on purpose, over its completed repeats, beside the same cell without the fault."""

    cell: str
    rank: int
    """The rank that is slowed."""
    delay_ms: float
    """The delay on purpose in each step."""
    n: int
    """Number of completed repeats."""
    found: int | None
    """The rank that the timeline names as the straggler, if all repeats agree."""
    waiting_ms: list[float]
    """For each rank, how long it waits in a step (metric `phase_waiting_ms`); empty if not known."""
    ordinary: str | None
    """The id of the same cell without the fault."""
    throughput_per_s: float | None
    """All ranks together, by the slowest rank of each step."""
    ordinary_throughput_per_s: float | None
    """The same of the cell without the fault."""
    rank_throughput_per_s: float | None
    """The sum over ranks, each by its own time."""
    ordinary_rank_throughput_per_s: float | None
    """The same of the cell without the fault."""
    staleness_mean: float | None
    """Updates; only with parameter servers."""
    ordinary_staleness_mean: float | None
    """The same of the cell without the fault."""


class LostWorkerEffect(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with a rank whose process ends on purpose, over its repeats. Means over the repeats that lost the rank."""

    cell: str
    rank: int
    """The rank that is lost."""
    step: int
    """The timed step that it does not make."""
    state: str
    """The states of the repeats."""
    n: int
    """Number of repeats that lost the rank."""
    before_per_s: float | None
    """Units per second of all ranks until the loss."""
    after_per_s: float | None
    """The same after the loss, until the first of the other ranks ends; None if the run ended."""
    unseen_units: float | None
    """Units of the asked steps on which no rank trained."""
    unseen_pct: float | None
    """Their share of all units of the asked steps."""
    last_step: int | None
    """The last timed step that all ranks made, without the lost rank after its end."""
    last_loss: float | None
    """The loss of this step."""
    ordinary: str | None
    """The id of the same cell without the fault."""
    ordinary_loss: float | None
    """The loss of that cell at its last step."""


class TrainedUnits(msgspec.Struct, frozen=True):
    """The units that ranks finished in a stretch of time, and its seconds."""

    unit_count: float
    duration_s: float


def describe_cells_with_faults(rows: Sequence[CellRow]) -> list[str]:
    """A remark that names the cells with faults on purpose; empty if there are none."""
    label_by_cell = map_cells_to_labels(rows)
    faulty_labels = [label_by_cell[row.id] for row in rows if "fault" in row.flat_cell]
    return [FAULT_REMARK.format("; ".join(faulty_labels))] if faulty_labels else []


def compute_straggler_effects(loaded: LoadedMatrix, rows: Sequence[CellRow]) -> list[StragglerEffect]:
    """The effects of slowed ranks, for each cell that has such a rank and completed runs."""
    ordinary_row_by_key = _map_ordinary_rows(rows)
    effects = []
    for cell, row in zip(loaded.cells, rows, strict=True):
        straggler = cell.cell.instruments.straggler
        if straggler is None or not cell.completed_runs:
            continue
        ordinary_row = ordinary_row_by_key.get(make_key_without_faults(row.cell))
        straggler_ranks = {slow_rank.rank if (slow_rank := find_straggler(run)) else None for run in cell.completed_runs}
        compared_metrics = ("throughput_per_s", "rank_throughput_per_s", "staleness_mean")
        effects.append(
            StragglerEffect(
                cell=cell.id,
                rank=straggler.rank,
                delay_ms=straggler.delay_ms,
                n=len(cell.completed_runs),
                found=straggler_ranks.pop() if len(straggler_ranks) == 1 else None,
                waiting_ms=_average_waiting_ms(cell),
                ordinary=ordinary_row.id if ordinary_row else None,
                **{name: _get_metric_value(row, name) for name in compared_metrics},
                **{f"ordinary_{name}": _get_metric_value(ordinary_row, name) for name in compared_metrics},
            )
        )
    return effects


def compute_lost_worker_effects(loaded: LoadedMatrix, rows: Sequence[CellRow]) -> list[LostWorkerEffect]:
    """The effects of lost workers, for each cell that has one and whose runs came so far."""
    ordinary_row_by_key = _map_ordinary_rows(rows)
    effects = []
    for cell, row in zip(loaded.cells, rows, strict=True):
        lost_worker = cell.cell.instruments.lost_worker
        runs = [run for run in cell.runs if lost_worker is not None and find_rank_loss_time_s(run) is not None]
        if lost_worker is None or not runs:
            continue
        ordinary_row = ordinary_row_by_key.get(make_key_without_faults(row.cell))
        unseen_and_total = [_count_unseen_units(run) for run in runs]
        losses = [(run.world_steps["step"][-1], run.world_steps["loss"][-1]) for run in runs if not run.world_steps.is_empty()]
        effects.append(
            LostWorkerEffect(
                cell=cell.id,
                rank=lost_worker.rank,
                step=lost_worker.step,
                state=row.state,
                n=len(runs),
                before_per_s=_compute_mean_rate(count_units_before_loss(run) for run in runs),
                after_per_s=_compute_mean_rate(count_units_after_loss(run) for run in runs),
                unseen_units=_average_known_values(units[0] if units else None for units in unseen_and_total),
                unseen_pct=_average_known_values(100 * units[0] / units[1] if units else None for units in unseen_and_total),
                last_step=min(step for step, _ in losses) if losses else None,
                last_loss=_average_known_values(loss for _, loss in losses),
                ordinary=ordinary_row.id if ordinary_row else None,
                ordinary_loss=_get_metric_value(ordinary_row, "final_loss"),
            )
        )
    return effects


def find_rank_loss_time_s(run: LoadedRun) -> float | None:
    """When a run lost the rank that its cell ends on purpose: the end of the last step of this rank, in seconds since the
    epoch. None if the rank did not come so far."""
    lost_worker = run.run.cell.instruments.lost_worker if run.run is not None else None
    if lost_worker is None:
        return None
    rank_steps = _select_timed_steps(run).filter(pl.col("rank") == lost_worker.rank)
    return float(rank_steps["wall_s"].max()) if rank_steps.height == lost_worker.step - 1 else None  # type: ignore[arg-type]


def count_units_before_loss(run: LoadedRun) -> TrainedUnits | None:
    """The units that all ranks finished from the start of the first timed step to the loss of the rank."""
    timed_steps, end_s = _select_timed_steps(run), find_rank_loss_time_s(run)
    if end_s is None:
        return None
    start_s = float((timed_steps["wall_s"] - timed_steps["step_ms"] / 1000).min())  # type: ignore[arg-type]
    return TrainedUnits(float(timed_steps.filter(pl.col("wall_s") <= end_s)["units"].sum()), end_s - start_s)


def count_units_after_loss(run: LoadedRun) -> TrainedUnits | None:
    """The units that the other ranks finished from the loss of the rank until the first of them had made all its steps.

    None if the run did not go on after the loss.
    """
    start_s = find_rank_loss_time_s(run)
    if start_s is None or not run.completed:
        return None
    lost_worker = run.cell.instruments.lost_worker
    assert lost_worker is not None
    other_steps = _select_timed_steps(run).filter(pl.col("rank") != lost_worker.rank)
    end_s = float(other_steps.group_by("rank").agg(pl.col("wall_s").max())["wall_s"].min())  # type: ignore[arg-type]
    steps_after_loss = other_steps.filter((pl.col("wall_s") > start_s) & (pl.col("wall_s") <= end_s))
    return TrainedUnits(float(steps_after_loss["units"].sum()), end_s - start_s) if end_s > start_s else None


def _select_timed_steps(run: LoadedRun) -> pl.DataFrame:
    """Every timed step that any rank recorded. Units of ranks that share a model are divided among them."""
    return run.steps.filter(~pl.col("warmup")).with_columns(pl.col("units") * (run.cell.data_ranks / run.cell.gpus))


def _count_unseen_units(run: LoadedRun) -> tuple[float, float] | None:
    """(units of data that no rank trained on, units of data of the whole run); None if the number of steps is not known."""
    step_count = run.cell.steps or (run.result.steps if run.result else None)
    steps = _select_timed_steps(run)
    first_steps = steps.filter(pl.col("step") == 1)
    if step_count is None or first_steps["rank"].n_unique() < run.cell.gpus:
        return None
    total_units = float(first_steps["units"].sum()) * step_count
    return total_units - float(steps["units"].sum()), total_units


def _map_ordinary_rows(rows: Iterable[CellRow]) -> dict[bytes, CellRow]:
    return {make_key_without_faults(row.cell): row for row in rows if "fault" not in row.flat_cell}


def _average_waiting_ms(cell: LoadedCell) -> list[float]:
    waiting_ms_of_runs = [measure_waiting_by_rank(run) for run in cell.completed_runs]
    if not all(waiting_ms_of_runs):
        return []
    return [statistics.fmean(run_waits[rank] for run_waits in waiting_ms_of_runs) for rank in range(cell.cell.gpus)]


def _get_metric_value(row: CellRow | None, metric_name: str) -> float | None:
    estimate = row.metrics.get(metric_name) if row is not None else None
    return None if estimate is None else estimate.value


def _compute_mean_rate(units_of_runs: Iterable[TrainedUnits | None]) -> float | None:
    return _average_known_values(
        trained.unit_count / trained.duration_s for trained in units_of_runs if trained is not None and trained.duration_s > 0
    )


def _average_known_values(known_or_none: Iterable[float | None]) -> float | None:
    known_values = [value for value in known_or_none if value is not None]
    return statistics.fmean(known_values) if known_values else None
