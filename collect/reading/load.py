"""Loads a matrix and its run folders as typed values and frames. A damaged file raises no error; it is listed with a reason."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from collect.loading.loaded_run import LoadedRun
from collect.loading.records import NO_FOLDER, Telemetry
from collect.reading import read_many
from shardlab.files import gc_pause
from shardlab.matrix.batch_search import try_cell
from shardlab.matrix.cell import Cell
from shardlab.matrix.expansion import ExpandedCell, Expansion
from shardlab.runs import lease_cutoff, search_path
from shardlab.runs.run import parse_run_id
from shardlab.runs.search_path import SearchPath
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace


class LoadedCell(msgspec.Struct):
    """A cell of the matrix with its runs."""

    id: str
    cell: Cell
    runs: list[LoadedRun]
    """For each repeat, its latest attempt."""
    earlier: list[LoadedRun]
    """For each repeat, the attempts before its latest attempt."""

    @property
    def completed(self) -> list[LoadedRun]:
        """The runs in `runs` that completed. Earlier attempts are not included."""
        return [run for run in self.runs if run.completed]


class Loaded(msgspec.Struct):
    """A matrix of a workspace with all its runs.

    If a cell has a search for its batch size, `cells` contains one cell for each batch size that the search tried, in place of
    the cell with the search.
    """

    expansion: Expansion
    cells: list[LoadedCell]
    searches: list[SearchPath] = []

    @property
    def runs(self) -> list[LoadedRun]:
        """All runs of the matrix that have a run folder, including earlier attempts."""
        return [run for cell in self.cells for run in (*cell.runs, *cell.earlier) if run.verdict != NO_FOLDER]


def load_matrix(workspace: Workspace, matrix: str | None, telemetry: Telemetry = "read") -> Loaded:
    """Load a matrix with all its runs. matrix: the name of the matrix; None: the matrix that was expanded last.

    Raises InputError if the workspace has no such matrix, or if its expansion cannot be read.
    """
    expansion, searches = _split_searched_cells(workspace, workspace.read_expansion(matrix))
    attempts: dict[str, list[str]] = {}
    for run_id in workspace.run_ids():
        if parts := parse_run_id(run_id):
            attempts.setdefault(parts.cell, []).append(run_id)
    run_ids_of_cells: list[set[str]] = []
    for entry in expansion.cells:
        run_ids_of_cells.append({run_id for run_id in (*entry.runs, *attempts.get(entry.id, ())) if parse_run_id(run_id)})
    with gc_pause.pause_collector():
        run_ids = sorted(set().union(*run_ids_of_cells))
        runs = {run.run_id: run for run in read_many.read_runs(workspace.runs, run_ids, telemetry)}
    lease, current_time = inventory.read_lease(workspace), datetime.now(UTC)
    for run in runs.values():
        run.reads_traces = expansion.traces
        last_record = datetime.fromtimestamp(run.last_record_s, UTC)
        run.verdict = lease_cutoff.judge_by_records(run.verdict, lease, last_record, current_time)
    cells = zip(expansion.cells, run_ids_of_cells, strict=True)
    loaded_cells = [_build_cell(entry.id, entry.cell, [runs[run_id] for run_id in ids]) for entry, ids in cells]
    return Loaded(expansion, loaded_cells, searches)


def _build_cell(cell_id: str, cell: Cell, runs: Iterable[LoadedRun]) -> LoadedCell:
    by_repeat: dict[int, list[LoadedRun]] = {}
    for run in runs:
        by_repeat.setdefault(run.repeat, []).append(run)
    latest, earlier = [], []
    for _, attempts in sorted(by_repeat.items()):
        attempts.sort(key=lambda run: run.attempt)
        latest.append(attempts[-1])
        earlier += attempts[:-1]
    return LoadedCell(cell_id, cell, latest, earlier)


def _split_searched_cells(workspace: Workspace, expansion: Expansion) -> tuple[Expansion, list[SearchPath]]:
    """Replace each cell that has a search for its batch size. Returns (the expansion with a cell for each batch size that was
    tried so far, all search paths).

    The cell for a batch size has the runs of all repeats that tried this batch size. There is one search path for each repeat
    of a cell that has a search.
    """
    cells: list[ExpandedCell] = []
    search_paths: list[SearchPath] = []
    for entry in expansion.cells:
        if entry.search is None:
            cells.append(entry)
            continue
        repeats = range(1, len(entry.runs) + 1)
        paths = [search_path.follow_search(workspace.runs, entry.cell, entry.search, repeat) for repeat in repeats]
        runs: dict[int, list[str]] = {}
        for path in paths:
            for attempt in path.tries:
                runs.setdefault(attempt.size, []).append(attempt.run)
        tried_cells = [(try_cell(entry.cell, size), names) for size, names in sorted(runs.items())]
        cells += [ExpandedCell(cell.name(), cell, names, entry.search) for cell, names in tried_cells] or [entry]
        search_paths += paths
    return msgspec.structs.replace(expansion, cells=cells), search_paths
