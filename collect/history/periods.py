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
from collect.reading.load import Loaded
from shardlab.terminal import moments

METRICS = ("step_time_ms", "throughput_per_s", "train_time_s", "peak_memory_bytes", "final_loss")


class HistoryRun(msgspec.Struct, frozen=True):
    """A completed run, with the workspace that contains it."""

    place: str
    """The workspace or archive, as the user named it."""
    matrix: str
    run: LoadedRun
    at: datetime
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


def select_history_runs(place: str, loaded: Loaded) -> list[HistoryRun]:
    """The completed runs of a matrix whose creation time is known. place: the workspace or archive, as the user named it."""
    history_runs = []
    for run in (run for cell in loaded.cells for run in cell.completed):
        created = moments.parse_time_as_utc(run.run.created) if run.run is not None else None
        if created is not None:
            history_runs.append(HistoryRun(place, loaded.expansion.name, run, created, environment.collect_properties([run])))
    return history_runs


def build_histories(runs: Iterable[HistoryRun]) -> list[CellHistory]:
    """The history of each cell.

    Runs belong to the same cell if the hash of their cells is equal, so that they did equal work in the same way. A run that
    several workspaces contain is counted once, because copies of a run have the same id and time.
    """
    by_cell: dict[str, dict[tuple[str, datetime], HistoryRun]] = {}
    for history_run in runs:
        by_cell.setdefault(history_run.run.cell.hash(), {}).setdefault((history_run.run.run_id, history_run.at), history_run)
    return [
        _build_history(sorted(group.values(), key=lambda entry: (entry.at, entry.run.run_id))) for group in by_cell.values()
    ]


def _build_history(runs: Sequence[HistoryRun]) -> CellHistory:
    groups: list[list[HistoryRun]] = []
    for entry in runs:
        last = groups[-1][-1] if groups else None
        if last is None or (last.place, last.matrix) != (entry.place, entry.matrix) or _find_changes(last, entry):
            groups.append([])
        groups[-1].append(entry)
    first = _compute_means(groups[0])
    periods = []
    for index, group in enumerate(groups):
        metrics = {
            name: HistoryMetric(value, unit, n, value / first[name][0] if name in first and value and first[name][0] else None)
            for name, (value, unit, n) in _compute_means(group).items()
        }
        periods.append(
            HistoryPeriod(
                place=group[0].place,
                matrix=group[0].matrix,
                first=_iso_text(group[0].at),
                last=_iso_text(group[-1].at),
                runs=[entry.run.run_id for entry in group],
                metrics=metrics,
                changed=_find_changes(groups[index - 1][-1], group[0]) if index else [],
            )
        )
    rehearsals = sum(entry.run.is_rehearsal for entry in runs)
    return CellHistory(runs[0].run.cell.name(), rehearsals, periods)


def _compute_means(runs: Sequence[HistoryRun]) -> dict[str, tuple[float, str, int]]:
    """Each metric of some runs of a cell: {name: (mean, unit, number of values)}.

    Metrics that were measured in different units or ways are left out.
    """
    means: dict[str, tuple[float, str, int]] = {}
    for name in METRICS:
        values: list[Any] = [metric.compute_quantities(history_run.run).get(name) for history_run in runs]
        known_values = [value for value in values if value is not None]
        if known_values and len({(value.unit, value.kind) for value in known_values}) == 1:
            means[name] = (fmean(value.value for value in known_values), known_values[0].unit, len(known_values))
    return means


def _find_changes(before: HistoryRun, after: HistoryRun) -> list[HistoryChange]:
    """The properties of machines and software that are known for both runs and differ between them."""
    return [HistoryChange(*change) for change in environment.property_differences(before.properties, after.properties)]


def _iso_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")
