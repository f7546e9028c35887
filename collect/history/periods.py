"""Groups runs of the same cell from several workspaces into periods, and says what changed from one period to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import msgspec

from collect import metric
from collect.comparison import environment
from collect.loading.loaded_run import LoadedRun
from collect.reading.load import LoadedMatrix
from shardlab.terminal import moments

HISTORY_METRICS = ("step_time_ms", "throughput_per_s", "train_time_s", "peak_memory_bytes", "final_loss")


class HistoryRun(msgspec.Struct, frozen=True):
    """A completed run, with the workspace that contains it."""

    place: str
    """The workspace or archive, as the user named it."""
    matrix: str
    run: LoadedRun
    created_at: datetime
    """When the run folder was written, before the run was submitted."""
    values_by_property: dict[str, list[str]]
    """The properties of the run's machines and software: name -> values (collect/comparison/environment.py)."""


class HistoryMetric(msgspec.Struct, frozen=True):
    """A metric over the runs of a period."""

    value: float
    """The mean over the runs."""
    unit: str
    n: int
    """The number of runs that have a value."""
    ratio: float | None
    """`value` divided by the value of this metric in the first period of the cell; None: one of these two values is not known
    or is 0."""


class HistoryChange(msgspec.Struct, frozen=True):
    """A property of machines or software that changed from one period to the next."""

    what: str
    """The property."""
    before: list[str]
    """Values of the property in the period before."""
    after: list[str]
    """Values of the property in this period."""


class HistoryPeriod(msgspec.Struct, frozen=True):
    """Runs of one cell that follow each other in one workspace with the same machines and software."""

    place: str
    """The workspace or archive, as given on the command line."""
    matrix: str
    first: str
    """When the first run of the period was rendered (ISO 8601, UTC)."""
    last: str
    """When the last run of the period was rendered (ISO 8601, UTC)."""
    runs: list[str]
    """Ids of the runs."""
    metrics: dict[str, HistoryMetric]
    """Name of a metric -> its mean over the runs of the period."""
    changed: list[HistoryChange]
    """The properties that differ from those of the period before; empty for the first period."""


class CellHistory(msgspec.Struct, frozen=True):
    """The periods of one cell, from the earliest."""

    cell: str
    """The name of the cell."""
    rehearsals: int
    """The number of runs of the cell that are rehearsals."""
    periods: list[HistoryPeriod]
    """In the order of time, the earliest first."""


def select_history_runs(place: str, loaded: LoadedMatrix) -> list[HistoryRun]:
    """The completed runs of a matrix whose creation time is known. place: the workspace or archive, as the user named it."""
    history_runs = []
    for run in (run for cell in loaded.cells for run in cell.completed_runs):
        created_at = moments.parse_time_as_utc(run.run.created) if run.run is not None else None
        if created_at is not None:
            properties = environment.collect_properties([run])
            history_runs.append(HistoryRun(place, loaded.expansion.name, run, created_at, properties))
    return history_runs


def build_histories(history_runs: Iterable[HistoryRun]) -> list[CellHistory]:
    """The history of each cell.

    Runs belong to the same cell if the hash of their cells is equal, so that they did equal work in the same way. A run that
    several workspaces contain is counted once, because copies of a run have the same id and time.
    """
    runs_by_cell: dict[str, dict[tuple[str, datetime], HistoryRun]] = {}
    for history_run in history_runs:
        cell_runs = runs_by_cell.setdefault(history_run.run.cell.hash(), {})
        cell_runs.setdefault((history_run.run.run_id, history_run.created_at), history_run)
    return [
        _build_history(sorted(cell_runs.values(), key=lambda dated_run: (dated_run.created_at, dated_run.run.run_id)))
        for cell_runs in runs_by_cell.values()
    ]


def _build_history(history_runs: Sequence[HistoryRun]) -> CellHistory:
    period_runs: list[list[HistoryRun]] = []
    for history_run in history_runs:
        previous_run = period_runs[-1][-1] if period_runs else None
        if (
            previous_run is None
            or (previous_run.place, previous_run.matrix) != (history_run.place, history_run.matrix)
            or _find_changes(previous_run, history_run)
        ):
            period_runs.append([])
        period_runs[-1].append(history_run)
    first_means = _compute_metric_means(period_runs[0])
    periods = []
    for period_index, runs_of_period in enumerate(period_runs):
        metric_by_name = {}
        for name, (value, unit, run_count) in _compute_metric_means(runs_of_period).items():
            ratio = value / first_means[name][0] if name in first_means and value and first_means[name][0] else None
            metric_by_name[name] = HistoryMetric(value, unit, run_count, ratio)
        periods.append(
            HistoryPeriod(
                place=runs_of_period[0].place,
                matrix=runs_of_period[0].matrix,
                first=_format_iso_time(runs_of_period[0].created_at),
                last=_format_iso_time(runs_of_period[-1].created_at),
                runs=[history_run.run.run_id for history_run in runs_of_period],
                metrics=metric_by_name,
                changed=_find_changes(period_runs[period_index - 1][-1], runs_of_period[0]) if period_index else [],
            )
        )
    rehearsal_count = sum(history_run.run.is_rehearsal for history_run in history_runs)
    return CellHistory(history_runs[0].run.cell.name(), rehearsal_count, periods)


def _compute_metric_means(history_runs: Sequence[HistoryRun]) -> dict[str, tuple[float, str, int]]:
    """Each metric of some runs of a cell: {name: (mean, unit, number of values)}.

    Metrics that were measured in different units or ways are left out.
    """
    mean_by_metric: dict[str, tuple[float, str, int]] = {}
    for metric_name in HISTORY_METRICS:
        quantities: list[Any] = [metric.compute_quantities(history_run.run).get(metric_name) for history_run in history_runs]
        known_quantities = [quantity for quantity in quantities if quantity is not None]
        if known_quantities and len({(quantity.unit, quantity.kind) for quantity in known_quantities}) == 1:
            mean = fmean(quantity.value for quantity in known_quantities)
            mean_by_metric[metric_name] = (mean, known_quantities[0].unit, len(known_quantities))
    return mean_by_metric


def _find_changes(earlier_run: HistoryRun, later_run: HistoryRun) -> list[HistoryChange]:
    """The properties of machines and software that are known for both runs and differ between them."""
    return [
        HistoryChange(*change)
        for change in environment.find_property_differences(earlier_run.values_by_property, later_run.values_by_property)
    ]


def _format_iso_time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")
