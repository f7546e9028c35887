"""A run for experiment trackers: its configuration, its values step by step, and its final metrics."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl

from collect.findings import columns
from collect.findings.row import flat
from collect.loading import read_many
from collect.loading.load import Loaded
from collect.loading.loaded_run import LoadedRun
from collect.metric import quantities
from collect.sources import steps
from collect.summary import Summary
from shardlab import cell_names, printable
from shardlab.cell import Cell
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace


class TrackedStep(msgspec.Struct, frozen=True):
    """What is known of a timed step: the world's loss, step_ms and throughput_per_s, and what validation found after it."""

    step: int
    wall_s: float
    values: dict[str, float]


class Tracked(msgspec.Struct, frozen=True):
    """group: its cell's short name, shared by repeats. config: the resolved cell, flat, and where the run comes from. metrics:
    by the names and in the units of the summary; none of a run that did not complete. began_s, ended_s: first and last step
    record, in seconds since the epoch, None where there is none. hosts: their names, with commas.
    """

    id: str
    group: str
    state: str
    tags: list[str]
    config: dict[str, Any]
    points: list[TrackedStep]
    metrics: dict[str, float]
    began_s: float | None
    ended_s: float | None
    hosts: str


def name(loaded: Loaded) -> str:
    """What a tracker calls the experiment or project: the matrix."""
    return printable.one_line(loaded.expansion.name)


def runs(loaded: Loaded, summary: Summary) -> list[Tracked]:
    """Every run folder that is there, earlier attempts too."""
    labels = summary.label_of
    metrics = {
        run.run_id: {name: float(value) for name, value in run.metrics.items()} for row in summary.rows for run in row.runs
    }
    there = {run.run_id for run in loaded.runs}
    return [
        _tracked(loaded.expansion.name, cell.cell, run, labels[cell.id], metrics.get(run.run_id, {}))
        for cell in loaded.cells
        for run in (*cell.runs, *cell.earlier)
        if run.run_id in there
    ]


def one(workspace: Workspace, folder: RunDir) -> tuple[str, Tracked]:
    """(what a tracker calls the experiment, the run as its records are now). Raises InputError if run.json or the notes on the
    matrix cannot be read."""
    expansion, cell = workspace.expansion(folder.read_run().matrix), folder.read_run().cell
    labels = columns.labels_of([flat(msgspec.to_builtins(entry.cell)) for entry in expansion.cells])
    label = next((label for entry, label in zip(expansion.cells, labels, strict=True) if entry.id == cell.name()), cell.name())
    (run,) = read_many.read(workspace.runs, [folder.run_id])
    metrics = {name: float(known.value) for name, known in quantities(run).items()} if run.completed else {}
    return printable.one_line(expansion.name), _tracked(expansion.name, cell, run, label, metrics)


def _tracked(matrix: str, cell: Cell, run: LoadedRun, label: str, metrics: dict[str, float]) -> Tracked:
    rehearsal = run.run is not None and run.run.rehearsal
    config = cell_names.names(msgspec.to_builtins(cell)) | {
        "matrix": matrix,
        "cell": cell.name(),
        "repeat": run.repeat,
        "attempt": run.attempt,
        "state": run.verdict.state,
        "rehearsal": rehearsal,
        "git_commit": run.run.git_commit if run.run else None,
    }
    tags = [matrix, cell.strategy, run.verdict.state, *(["rehearsal"] if rehearsal else [])]
    began, ended = run.steps.select(began=pl.col("wall_s").min(), ended=pl.col("wall_s").max()).row(0)
    hosts = ", ".join(dict.fromkeys(host.host for host in run.hosts))
    label, tags, config, hosts = printable.mapped([label, tags, config, hosts], printable.one_line)
    return Tracked(run.run_id, label, run.verdict.state, tags, config, _points(run), metrics, began, ended, hosts)


def _points(run: LoadedRun) -> list[TrackedStep]:
    """Steps that an instrument slowed down have a loss and no times."""
    world = steps.of_world(run.timed).select("step", "wall_s", "loss")
    times = steps.of_world(steps.unwatched(run.timed)).select(
        "step", "step_ms", throughput_per_s=1000 * pl.col("units") / pl.col("step_ms")
    )
    validation = {
        record.step: {"validation_loss": record.loss, "validation_accuracy_pct": 100 * record.accuracy}
        for record in run.validation
    }
    points = []
    for row in world.join(times, on="step", how="left").sort("step").iter_rows(named=True):
        step, wall_s = row.pop("step"), row.pop("wall_s")
        values = {name: value for name, value in row.items() if value is not None}
        points.append(TrackedStep(step, wall_s, values | validation.get(step, {})))
    return points
