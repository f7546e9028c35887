"""Loads a matrix and its run folders as typed values and frames. Damaged files are listed with the reason and stop nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import polars as pl

from collect import metric, reading
from collect.metric import Measured, Quantity
from collect.records import NO_FOLDER, Damage
from collect.sources import memory
from collect.sources.memory import MemoryCurves
from collect.sources.samples import Samples
from collect.sources.steps import Frames
from collect.telemetry import Coverage
from collect.traces import of_run
from collect.traces.breakdown import Breakdown
from collect.traces.of_run import Told
from shardlab import cycles
from shardlab.cell import Cell
from shardlab.expansion import Expansion
from shardlab.host import Host
from shardlab.record import Result, ValidationRecord
from shardlab.run import Run
from shardlab.rundir import RunDir
from shardlab.state import Verdict
from shardlab.study import Traces
from shardlab.workspace import Workspace

_ATTEMPT = re.compile(r"(?P<cell>.+)-r(?P<repeat>\d+)(?:-a(?P<attempt>\d+))?")


class LoadedRun(msgspec.Struct, dict=True):
    """One run folder. run, result: run.json and result.json; None if the file is missing or damaged, then `verdict` says why.

    steps: every recorded step; timed: the timed steps that every rank recorded; world: the same steps, one row per step. All
    three are empty without a run.json, because the number of ranks is not known then. unreadable: why the run is set aside, or
    ''. profiled: the run has a folder for traces. paused: the run was suspended between its first and its last timed step.
    quantities: the metrics of the run if they were computed while it was read, for the cell in its run.json, else None
    (`LoadedCell.quantities` has the metrics of every run).
    """

    folder: RunDir
    repeat: int
    attempt: int
    verdict: Verdict
    run: Run | None
    result: Result | None
    steps: pl.DataFrame
    timed: pl.DataFrame
    world: pl.DataFrame
    samples: Samples
    validation: list[ValidationRecord]
    damage: Damage
    hosts: list[Host]
    profiled: bool
    paused: bool
    reads_traces: Traces
    unreadable: str
    quantities: dict[str, Quantity] | None
    coverage: list[Coverage]

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @cached_property
    def memory(self) -> MemoryCurves | None:
        """What memory held over one step of rank 0, where an instrument looked."""
        return memory.read(self.folder.memory_file(0))

    @cached_property
    def traces(self) -> Told:
        """What the traces of the ranks that were profiled say."""
        return of_run.read(self.folder.path, self.reads_traces) if self.profiled else Told()

    @property
    def breakdowns(self) -> list[Breakdown]:
        """Of the ranks that were profiled, read as the matrix says."""
        return self.traces.judged

    @property
    def completed(self) -> bool:
        return self.verdict.state == "completed"

    @property
    def resumed(self) -> bool:
        """Whether it has a result and went on from a checkpoint."""
        return self.result is not None and self.result.resumed


class LoadedCell(msgspec.Struct):
    """A point of the matrix. runs: the latest attempt of each repeat; earlier: the attempts before them."""

    id: str
    cell: Cell
    runs: list[LoadedRun]
    earlier: list[LoadedRun]

    @property
    def completed(self) -> list[LoadedRun]:
        return [run for run in self.runs if run.completed]

    def measured(self, run: LoadedRun) -> Measured:
        """What a metric sees of one of this cell's runs."""
        steps = Frames(run.steps, run.timed, run.world)
        told = (run.result, run.hosts, run.validation, run.breakdowns)
        return metric.measured(self.cell, steps, run.samples, *told, paused=run.paused)

    def quantities(self, run: LoadedRun) -> dict[str, Quantity]:
        """Every metric of one of this cell's runs that is known."""
        if run.quantities is not None and run.run is not None and run.run.cell == self.cell:
            return run.quantities
        return metric.quantities(self.measured(run))


class Loaded(msgspec.Struct):
    """A matrix as it stands in a workspace."""

    expansion: Expansion
    cells: list[LoadedCell]

    @property
    def runs(self) -> list[LoadedRun]:
        """Every run folder that is there, earlier attempts too."""
        return [run for cell in self.cells for run in (*cell.runs, *cell.earlier) if run.verdict != NO_FOLDER]


def load(workspace: Workspace, matrix: str | None) -> Loaded:
    """The named matrix, or the last one. Raises InputError if there is no matrix or its expansion cannot be read."""
    expansion = workspace.expansion(matrix)
    attempts: dict[str, list[str]] = {}
    for run_id in workspace.run_ids():
        if match := _ATTEMPT.fullmatch(run_id):
            attempts.setdefault(match["cell"], []).append(run_id)
    cells: list[tuple[str, Cell, set[str]]] = []
    for entry in expansion.cells:
        ids = {run_id for run_id in (*entry.runs, *attempts.get(entry.id, ())) if _ATTEMPT.fullmatch(run_id)}
        cells.append((entry.id, entry.cell, ids))
    ids_of = sorted({run_id for _, _, ids in cells for run_id in ids})
    with cycles.not_searched():
        runs = {run.run_id: run for run in _runs(workspace, ids_of, expansion.traces)}
    return Loaded(expansion, [_cell(cell_id, cell, [runs[run_id] for run_id in ids]) for cell_id, cell, ids in cells])


def _cell(cell_id: str, cell: Cell, runs: Iterable[LoadedRun]) -> LoadedCell:
    by_repeat: dict[int, list[LoadedRun]] = {}
    for run in runs:
        by_repeat.setdefault(run.repeat, []).append(run)
    latest, earlier = [], []
    for _, attempts in sorted(by_repeat.items()):
        attempts.sort(key=lambda run: run.attempt)
        latest.append(attempts[-1])
        earlier += attempts[:-1]
    return LoadedCell(cell_id, cell, latest, earlier)


def _runs(workspace: Workspace, run_ids: Sequence[str], how: Traces) -> Iterator[LoadedRun]:
    for run_id, (found, frames, sampled, derived) in zip(run_ids, reading.read(workspace.runs, run_ids), strict=True):
        match = _ATTEMPT.fullmatch(run_id)
        assert match is not None
        yield LoadedRun(
            folder=RunDir(workspace.runs / run_id),
            repeat=int(match["repeat"]),
            attempt=int(match["attempt"] or 1),
            verdict=found.verdict,
            run=found.run,
            result=found.result,
            steps=frames.every,
            timed=frames.timed,
            world=frames.world,
            samples=sampled,
            validation=found.validation,
            damage=found.damage,
            hosts=found.hosts,
            profiled=found.profiled,
            paused=found.paused,
            reads_traces=how,
            unreadable=found.unreadable,
            quantities=derived.quantities,
            coverage=derived.coverage,
        )
