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
    properties: dict[str, list[str]]
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


def build_histories(runs: Iterable[HistoryRun]) -> list[CellHistory]:
    """The history of each cell.

    Runs belong to the same cell if the hash of their cells is equal, so that they did equal work in the same way. A run that
    several workspaces contain is counted once, because copies of a run have the same id and time.
    """
    runs_by_cell: dict[str, dict[tuple[str, datetime], HistoryRun]] = {}
    for history_run in runs:
        cell_runs = runs_by_cell.setdefault(history_run.run.cell.hash(), {})
        cell_runs.setdefault((history_run.run.run_id, history_run.created_at), history_run)
    return [
        _build_history(sorted(cell_runs.values(), key=lambda dated_run: (dated_run.created_at, dated_run.run.run_id)))
        for cell_runs in runs_by_cell.values()
    ]


def _build_history(runs: Sequence[HistoryRun]) -> CellHistory:
    period_runs: list[list[HistoryRun]] = []
    for history_run in runs:
        previous_run = period_runs[-1][-1] if period_runs else None
        if (
            previous_run is None
            or (previous_run.place, previous_run.matrix) != (history_run.place, history_run.matrix)
            or _find_changes(previous_run, history_run)
        ):
            period_runs.append([])
        period_runs[-1].append(history_run)
    first_means = _compute_means(period_runs[0])
    periods = []
    for index, runs_of_period in enumerate(period_runs):
        metrics = {}
        for name, (value, unit, run_count) in _compute_means(runs_of_period).items():
            ratio = value / first_means[name][0] if name in first_means and value and first_means[name][0] else None
            metrics[name] = HistoryMetric(value, unit, run_count, ratio)
        periods.append(
            HistoryPeriod(
                place=runs_of_period[0].place,
                matrix=runs_of_period[0].matrix,
                first=_iso_text(runs_of_period[0].created_at),
                last=_iso_text(runs_of_period[-1].created_at),
                runs=[history_run.run.run_id for history_run in runs_of_period],
                metrics=metrics,
                changed=_find_changes(period_runs[index - 1][-1], runs_of_period[0]) if index else [],
            )
        )
    rehearsals = sum(history_run.run.is_rehearsal for history_run in runs)
    return CellHistory(runs[0].run.cell.name(), rehearsals, periods)


def _compute_means(runs: Sequence[HistoryRun]) -> dict[str, tuple[float, str, int]]:
    """Each metric of some runs of a cell: {name: (mean, unit, number of values)}.

    Metrics that were measured in different units or ways are left out.
    """
    mean_of_metric: dict[str, tuple[float, str, int]] = {}
    for metric_name in HISTORY_METRICS:
        values: list[Any] = [metric.compute_quantities(history_run.run).get(metric_name) for history_run in runs]
        known_values = [value for value in values if value is not None]
        if known_values and len({(value.unit, value.kind) for value in known_values}) == 1:
            mean = fmean(value.value for value in known_values)
            mean_of_metric[metric_name] = (mean, known_values[0].unit, len(known_values))
    return mean_of_metric


def _find_changes(before: HistoryRun, after: HistoryRun) -> list[HistoryChange]:
    """The properties of machines and software that are known for both runs and differ between them."""
    return [HistoryChange(*change) for change in environment.find_property_differences(before.properties, after.properties)]


def _iso_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")
