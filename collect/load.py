"""A matrix and its run folders -> typed values and frames; what is damaged is listed with its reason and stops nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import polars as pl

from collect import records
from collect.metric import Measured
from collect.records import Damage
from collect.sources import memory, samples, steps
from collect.sources.memory import MemoryCurves
from collect.sources.samples import Samples
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

_ATTEMPT = re.compile(r"(?P<cell>.+)-r(?P<repeat>\d+)(?:-a(?P<attempt>\d+))?")


class LoadedRun(msgspec.Struct):
    """One run folder. run, result: None where there is none or it is damaged, then the verdict says why.

    steps: every recorded step; timed: the timed ones that every rank recorded. Both are empty without a run.json, as the
    size of the world is unknown then.
    """

    run_id: str
    repeat: int
    attempt: int
    verdict: Verdict
    run: Run | None
    result: Result | None
    steps: pl.DataFrame
    timed: pl.DataFrame
    samples: Samples
    validation: list[ValidationRecord]
    damage: Damage
    traces: Told
    memory: MemoryCurves | None
    hosts: list[Host]

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
        return Measured(self.cell, run.timed, seen, run.result, run.hosts, run.breakdowns, run.validation)


class Loaded(msgspec.Struct):
    """A matrix as it stands in a workspace."""

    expansion: Expansion
    cells: list[LoadedCell]

    @property
    def runs(self) -> list[LoadedRun]:
        """Every run folder that is there, earlier attempts too."""
        return [run for cell in self.cells for run in (*cell.runs, *cell.earlier) if run.verdict != NO_FOLDER]


NO_FOLDER = Verdict("planned", "no run folder yet")


def load(workspace: Workspace, matrix: str | None) -> Loaded:
    """The named matrix, or the last one. Raises InputError where there is none or its notes are not readable."""
    expansion = workspace.expansion(matrix)
    attempts: dict[str, list[str]] = {}
    for run_id in workspace.run_ids():
        if match := _ATTEMPT.fullmatch(run_id):
            attempts.setdefault(match["cell"], []).append(run_id)
    cells = []
    for entry in expansion.cells:
        try:
            cell_id, first = str(entry["id"]), msgspec.convert(entry["runs"], list[str])
            cell = msgspec.convert(entry["cell"], Cell)
        except (KeyError, msgspec.ValidationError) as error:
            raise InputError(f"{expansion.path}: its expansion in this workspace is not of this version: {error}.") from None
        cells.append(_cell(workspace, cell_id, cell, {*first, *attempts.get(cell_id, ())}, expansion.traces))
    return Loaded(expansion, cells)


def _cell(workspace: Workspace, cell_id: str, cell: Cell, run_ids: Iterable[str], how: Traces) -> LoadedCell:
    by_repeat: dict[int, list[LoadedRun]] = {}
    for run_id in run_ids:
        if match := _ATTEMPT.fullmatch(run_id):
            repeat, attempt = int(match["repeat"]), int(match["attempt"] or 1)
            by_repeat.setdefault(repeat, []).append(_run(RunDir(workspace.runs / run_id), repeat, attempt, how))
    latest, earlier = [], []
    for _, runs in sorted(by_repeat.items()):
        runs.sort(key=lambda run: run.attempt)
        latest.append(runs[-1])
        earlier += runs[:-1]
    return LoadedCell(cell_id, cell, latest, earlier)


def _run(folder: RunDir, repeat: int, attempt: int, how: Traces) -> LoadedRun:
    run: Run | None = None
    result: Result | None = None
    if not folder.path.is_dir():
        verdict = NO_FOLDER
    else:
        try:
            run = folder.read_run()
            result = folder.read_result()
            verdict = folder.judge()
        except InputError as error:
            verdict = Verdict("unknown", str(error))
    found = records.read(folder)
    rows = steps.frame(found.steps if run else {})
    return LoadedRun(
        run_id=folder.run_id,
        repeat=repeat,
        attempt=attempt,
        verdict=verdict,
        run=run,
        result=result,
        steps=rows,
        timed=steps.timed(rows, run.cell.gpus, run.cell.dp) if run else steps.timed(rows, 0, 0),
        samples=samples.frames(found.samples),
        validation=found.validation,
        damage=found.damage,
        traces=of_run.read(folder.path, how),
        memory=memory.read(folder.memory_file(0)),
        hosts=_hosts(folder),
    )


def _hosts(folder: RunDir) -> list[Host]:
    """What the hosts of a run said they are; a file that is damaged says nothing."""
    hosts = []
    for path in sorted(folder.path.glob("env/*.json")):
        try:
            hosts.append(msgspec.json.decode(path.read_bytes(), type=Host))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    return hosts
