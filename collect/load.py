"""A matrix and its run folders -> typed values and frames; what is damaged is listed with its reason and stops nothing."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import polars as pl

from collect import records
from collect.metric import Measured
from collect.records import NO_FOLDER, Damage, Records
from collect.sources import memory, samples, steps
from collect.sources.memory import MemoryCurves
from collect.sources.samples import Samples
from collect.sources.steps import Recorded
from collect.traces import of_run
from collect.traces.breakdown import Breakdown
from collect.traces.of_run import Told
from shardlab.cell import Cell
from shardlab.errors import InputError
from shardlab.host import Host
from shardlab.record import Result, ValidationRecord
from shardlab.run import Run
from shardlab.rundir import RunDir
from shardlab.state import Verdict
from shardlab.workspace import Expansion, Traces, Workspace

AT_ONCE = 50_000  # records of many small runs that wait to become frames
_ATTEMPT = re.compile(r"(?P<cell>.+)-r(?P<repeat>\d+)(?:-a(?P<attempt>\d+))?")


class LoadedRun(msgspec.Struct, dict=True):
    """One run folder. run, result: None where there is none or it is damaged, then the verdict says why.

    steps: every recorded step; timed: the timed ones that every rank recorded; world: those, one row per step. All are empty
    without a run.json, as the size of the world is unknown then.
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
    reads_traces: Traces

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
        return of_run.read(self.folder.path, self.reads_traces)

    @property
    def breakdowns(self) -> list[Breakdown]:
        """Of the ranks that were profiled, read as the matrix says."""
        return self.traces.judged

    @property
    def completed(self) -> bool:
        return self.verdict.state == "completed"

    @property
    def resumed(self) -> bool:
        """Whether it went on from a checkpoint: between its first timed step and its last lies time in which it did not run."""
        return self.result is not None and self.result.resumed_from_step is not None


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
        """What a metric sees of one of this cell's runs: no telemetry of a resumed one, which covers only a part of it."""
        seen = samples.frames({}) if run.resumed else run.samples
        return Measured(self.cell, run.timed, run.world, seen, run.result, run.hosts, run.breakdowns, run.validation)


class Loaded(msgspec.Struct):
    """A matrix as it stands in a workspace."""

    expansion: Expansion
    cells: list[LoadedCell]

    @property
    def runs(self) -> list[LoadedRun]:
        """Every run folder that is there, earlier attempts too."""
        return [run for cell in self.cells for run in (*cell.runs, *cell.earlier) if run.verdict != NO_FOLDER]


def load(workspace: Workspace, matrix: str | None) -> Loaded:
    """The named matrix, or the last one. Raises InputError where there is none or its notes are not readable."""
    expansion = workspace.expansion(matrix)
    attempts: dict[str, list[str]] = {}
    for run_id in workspace.run_ids():
        if match := _ATTEMPT.fullmatch(run_id):
            attempts.setdefault(match["cell"], []).append(run_id)
    cells: list[tuple[str, Cell, set[str]]] = []
    for entry in expansion.cells:
        try:
            cell_id, first = str(entry["id"]), msgspec.convert(entry["runs"], list[str])
            ids = {run_id for run_id in (*first, *attempts.get(cell_id, ())) if _ATTEMPT.fullmatch(run_id)}
            cells.append((cell_id, msgspec.convert(entry["cell"], Cell), ids))
        except (KeyError, msgspec.ValidationError) as error:
            raise InputError(f"{expansion.path}: its expansion in this workspace is not of this version: {error}.") from None
    ids_of = sorted({run_id for _, _, ids in cells for run_id in ids})
    with _no_search_for_cycles():
        runs = {run.run_id: run for run in _runs(workspace, ids_of, expansion.traces)}
    return Loaded(expansion, [_cell(cell_id, cell, [runs[run_id] for run_id in ids]) for cell_id, cell, ids in cells])


@contextlib.contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Millions of records come and none is part of a cycle: the search took a third of the time."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()


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


def _runs(workspace: Workspace, run_ids: Iterable[str], how: Traces) -> Iterator[LoadedRun]:
    """These runs, read some at a time: as records they take several times the memory that their frames do."""
    pending: list[tuple[RunDir, Records]] = []
    count = 0
    for run_id in run_ids:
        folder = RunDir(workspace.runs / run_id)
        found = records.read(folder)
        pending.append((folder, found))
        count += found.count
        if count > AT_ONCE:
            yield from _framed(pending, how)
            pending, count = [], 0
    yield from _framed(pending, how)


def _framed(pending: Sequence[tuple[RunDir, Records]], how: Traces) -> Iterator[LoadedRun]:
    found = [read for _, read in pending]
    of_steps = steps.frames(
        [Recorded(one.steps, one.run.cell.gpus, one.run.cell.dp) if one.run else Recorded({}) for one in found]
    )
    of_samples = samples.of_runs([one.samples for one in found])
    for (folder, one), frames, sampled in zip(pending, of_steps, of_samples, strict=True):
        match = _ATTEMPT.fullmatch(folder.run_id)
        assert match is not None
        yield LoadedRun(
            folder=folder,
            repeat=int(match["repeat"]),
            attempt=int(match["attempt"] or 1),
            verdict=one.verdict,
            run=one.run,
            result=one.result,
            steps=frames.every,
            timed=frames.timed,
            world=frames.world,
            samples=sampled,
            validation=one.validation,
            damage=one.damage,
            hosts=one.hosts,
            reads_traces=how,
        )
