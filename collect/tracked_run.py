"""Describes a run as experiment trackers need it: its configuration, its values step by step, and its final metrics."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl

from collect.findings import columns
from collect.findings.row import flatten_cell
from collect.loading.loaded_run import LoadedRun
from collect.metric import compute_quantities
from collect.reading import read_many
from collect.reading.load import LoadedMatrix
from collect.sources import steps
from collect.summary import Summary
from shardlab.matrix import cell_names
from shardlab.matrix.cell import AnyCell
from shardlab.runs.rundir import RunDir
from shardlab.terminal import printable
from shardlab.workspace.workspace import Workspace


class TrackedStep(msgspec.Struct, frozen=True):
    """The values of a timed step over all ranks: loss, step time, throughput, and the results of a validation after the
    step."""

    step: int
    """Number of the step."""
    wall_s: float
    """Time of the step record, in seconds since the epoch."""
    values: dict[str, float]
    """Name, such as `loss` or `step_ms` -> value; a value that is not known has no entry."""


class TrackedRun(msgspec.Struct, frozen=True):
    """A run with all data that an experiment tracker stores."""

    id: str
    group: str
    """The short name of the cell; all repeats of the cell have the same group."""
    state: str
    tags: list[str]
    config: dict[str, Any]
    """Keys of the resolved cell, flattened, and where the run comes from (matrix, repeat, commit ...)."""
    timed_steps: list[TrackedStep]
    """The timed steps."""
    metrics: dict[str, float]
    """Names and units as in the summary; empty if the run did not complete."""
    began_s: float | None
    """Time of the first step record, in seconds since the epoch; None: there are no records."""
    ended_s: float | None
    """Time of the last step record, in seconds since the epoch; None: there are no records."""
    hosts: str
    """Names of the hosts, separated by commas."""


def get_experiment_name(loaded: LoadedMatrix) -> str:
    """The name of the experiment or project in a tracker: the name of the matrix."""
    return printable.clean_to_one_line(loaded.expansion.name)


def list_tracked_runs(loaded: LoadedMatrix, summary: Summary) -> list[TrackedRun]:
    """All runs of the matrix that have a run folder, including earlier attempts."""
    label_by_cell = summary.labels_by_cell
    metrics_by_run = {
        run.run_id: {name: float(value) for name, value in run.metrics.items()} for row in summary.rows for run in row.runs
    }
    runs_with_folder = {run.run_id for run in loaded.runs}
    return [
        _build_tracked_run(loaded.expansion.name, cell.cell, run, label_by_cell[cell.id], metrics_by_run.get(run.run_id, {}))
        for cell in loaded.cells
        for run in (*cell.runs, *cell.earlier_attempts)
        if run.run_id in runs_with_folder
    ]


def read_tracked_run(workspace: Workspace, run_dir: RunDir) -> tuple[str, TrackedRun]:
    """Read a run as its records are now, for a tracker that follows the run while it is still going on.

    Returns (name of the experiment in the tracker, the run). Raises InputError if run.json or the expansion of the matrix
    cannot be read.
    """
    expansion, cell = workspace.read_expansion(run_dir.read_run().matrix), run_dir.read_run().cell
    labels = columns.make_cell_labels([flatten_cell(msgspec.to_builtins(entry.cell)) for entry in expansion.cells])
    label = next((label for entry, label in zip(expansion.cells, labels, strict=True) if entry.id == cell.name()), cell.name())
    (run,) = read_many.read_runs(workspace.runs, [run_dir.run_id])
    metrics = {name: float(quantity.value) for name, quantity in compute_quantities(run).items()}
    return printable.clean_to_one_line(expansion.name), _build_tracked_run(expansion.name, cell, run, label, metrics)


def _build_tracked_run(matrix_name: str, cell: AnyCell, run: LoadedRun, label: str, metrics: dict[str, float]) -> TrackedRun:
    config = cell_names.map_cell_values(msgspec.to_builtins(cell)) | {
        "matrix": matrix_name,
        "cell": cell.name(),
        "repeat": run.repeat,
        "attempt": run.attempt,
        "state": run.verdict.state,
        "rehearsal": run.is_rehearsal,
        "git_commit": run.run.git_commit if run.run else None,
    }
    tags = [matrix_name, cell.strategy, run.verdict.state, *(["rehearsal"] if run.is_rehearsal else [])]
    began_s, ended_s = run.steps.select(began=pl.col("wall_s").min(), ended=pl.col("wall_s").max()).row(0)
    host_names = ", ".join(dict.fromkeys(host.host for host in run.hosts))
    label, tags, config, host_names = printable.map_texts([label, tags, config, host_names], printable.clean_to_one_line)
    return TrackedRun(
        run.run_id, label, run.verdict.state, tags, config, _list_tracked_steps(run), metrics, began_s, ended_s, host_names
    )


def _list_tracked_steps(run: LoadedRun) -> list[TrackedStep]:
    """The timed steps of a run. A step that an instrument slowed down has a loss, but no step time and no throughput."""
    step_losses = steps.join_world_steps(run.timed_steps).select("step", "wall_s", "loss")
    step_times = steps.join_world_steps(steps.select_unwatched_steps(run.timed_steps)).select(
        "step", "step_ms", throughput_per_s=1000 * pl.col("units") / pl.col("step_ms")
    )
    validation_by_step = {
        record.step: {"validation_loss": record.loss, "validation_accuracy_pct": 100 * record.accuracy}
        for record in run.validation
    }
    tracked_steps = []
    for row in step_losses.join(step_times, on="step", how="left").sort("step").iter_rows(named=True):
        step, wall_s = row.pop("step"), row.pop("wall_s")
        value_by_name = {name: value for name, value in row.items() if value is not None}
        tracked_steps.append(TrackedStep(step, wall_s, value_by_name | validation_by_step.get(step, {})))
    return tracked_steps
