"""Loads a matrix with all its runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from collect.loading.loaded_run import LoadedRun
from collect.loading.records import NO_FOLDER_STATE, Telemetry
from collect.reading import read_many
from shardlab.errors import InputError
from shardlab.files import gc_pause
from shardlab.matrix.batch_search import try_cell
from shardlab.matrix.cell import IMPORTED_PREFIX, AnyCell
from shardlab.matrix.expansion import ExpandedCell, Expansion
from shardlab.runs import lease_cutoff, search_path
from shardlab.runs.run import parse_run_id
from shardlab.runs.rundir import RunDir
from shardlab.runs.search_path import SearchPath
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace


class LoadedCell(msgspec.Struct):
    """A cell of the matrix with its runs."""

    id: str
    cell: AnyCell
    runs: list[LoadedRun]
    """For each repeat, its latest attempt."""
    earlier_attempts: list[LoadedRun]
    """For each repeat, the attempts before its latest attempt."""

    @property
    def completed_runs(self) -> list[LoadedRun]:
        """The runs in `runs` that completed."""
        return [run for run in self.runs if run.completed]


class LoadedMatrix(msgspec.Struct):
    """A matrix of a workspace with all its runs.

    In place of a cell with a search for its batch size, `cells` has one cell for each batch size that the search tried.
    """

    expansion: Expansion
    cells: list[LoadedCell]
    searches: list[SearchPath] = []

    @property
    def runs(self) -> list[LoadedRun]:
        """All runs of the matrix that have a run folder, including earlier attempts."""
        return [run for cell in self.cells for run in (*cell.runs, *cell.earlier_attempts) if run.verdict != NO_FOLDER_STATE]


def load_matrix(workspace: Workspace, matrix: str | None, telemetry: Telemetry = "read") -> LoadedMatrix:
    """Load a matrix with all its runs. matrix: the name of the matrix; None: the matrix that was expanded last.

    Raises InputError if the workspace has no such matrix, or if its expansion cannot be read.
    """
    expansion, searches = _split_searched_cells(workspace, _add_imported_cells(workspace, workspace.read_expansion(matrix)))
    run_ids_by_cell: dict[str, list[str]] = {}
    for run_id in workspace.list_run_ids():
        if id_parts := parse_run_id(run_id):
            run_ids_by_cell.setdefault(id_parts.cell_name, []).append(run_id)
    run_ids_of_cells: list[set[str]] = []
    for expanded_cell in expansion.cells:
        cell_run_ids = (*expanded_cell.runs, *run_ids_by_cell.get(expanded_cell.id, ()))
        run_ids_of_cells.append({run_id for run_id in cell_run_ids if parse_run_id(run_id)})
    with gc_pause.pause_collector():
        all_run_ids = sorted(set().union(*run_ids_of_cells))
        run_by_id = {run.run_id: run for run in read_many.read_runs(workspace.runs, all_run_ids, telemetry)}
    lease, current_time = inventory.read_lease(workspace), datetime.now(UTC)
    for run in run_by_id.values():
        run.trace_method = expansion.traces
        last_record_time = datetime.fromtimestamp(run.last_record_s, UTC)
        run.verdict = lease_cutoff.judge_by_records(run.verdict, lease, last_record_time, current_time)
    cells_and_run_ids = zip(expansion.cells, run_ids_of_cells, strict=True)
    loaded_cells = [
        _build_loaded_cell(expanded_cell.id, expanded_cell.cell, [run_by_id[run_id] for run_id in cell_run_ids])
        for expanded_cell, cell_run_ids in cells_and_run_ids
    ]
    return LoadedMatrix(expansion, loaded_cells, searches)


def _add_imported_cells(workspace: Workspace, expansion: Expansion) -> Expansion:
    """The expansion with the cells of imported runs. The runs alone remember them, because `jobs` writes the expansion of a
    matrix again whenever it renders the matrix."""
    cell_by_id = {cell.id: cell for cell in expansion.cells}
    for run_id in workspace.list_run_ids():
        if run_id.startswith(IMPORTED_PREFIX):
            with contextlib.suppress(InputError):  # the matrix of a run without a readable run.json is not known
                run = RunDir(workspace.runs / run_id).read_run()
                if run.imported and run.matrix == expansion.name:
                    cell_by_id.setdefault(run.cell.name(), ExpandedCell(run.cell.name(), run.cell, [run_id]))
    return msgspec.structs.replace(expansion, cells=list(cell_by_id.values()))


def _build_loaded_cell(cell_id: str, cell: AnyCell, runs: Iterable[LoadedRun]) -> LoadedCell:
    attempts_by_repeat: dict[int, list[LoadedRun]] = {}
    for run in runs:
        attempts_by_repeat.setdefault(run.repeat, []).append(run)
    latest_runs, earlier_runs = [], []
    for _, repeat_attempts in sorted(attempts_by_repeat.items()):
        repeat_attempts.sort(key=lambda run: run.attempt)
        latest_runs.append(repeat_attempts[-1])
        earlier_runs += repeat_attempts[:-1]
    return LoadedCell(cell_id, cell, latest_runs, earlier_runs)


def _split_searched_cells(workspace: Workspace, expansion: Expansion) -> tuple[Expansion, list[SearchPath]]:
    """Replace each cell that has a search for its batch size by a cell for each batch size that was tried so far, with the
    runs of all repeats that tried it. Returns (the expansion, one search path for each repeat of a cell with a search)."""
    split_cells: list[ExpandedCell] = []
    search_paths: list[SearchPath] = []
    for expanded_cell in expansion.cells:
        if expanded_cell.search is None:
            split_cells.append(expanded_cell)
            continue
        training_cell = expanded_cell.cell.require_training()
        cell_search_paths = [
            search_path.follow_search(workspace.runs, training_cell, expanded_cell.search, repeat)
            for repeat in range(1, len(expanded_cell.runs) + 1)
        ]
        runs: dict[int, list[str]] = {}
        for repeat_search_path in cell_search_paths:
            for batch_try in repeat_search_path.tries:
                runs.setdefault(batch_try.size, []).append(batch_try.run)
        tried_cells = [(try_cell(training_cell, batch_size), run_ids) for batch_size, run_ids in sorted(runs.items())]
        split_cells += [ExpandedCell(cell.name(), cell, run_ids, expanded_cell.search) for cell, run_ids in tried_cells] or [
            expanded_cell
        ]
        search_paths += cell_search_paths
    return msgspec.structs.replace(expansion, cells=split_cells), search_paths
