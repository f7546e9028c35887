"""Finds the searches for a batch size to which runs of a workspace belong, for commands that show, follow or cancel runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from jobs.status.reconcile import Status
from shardlab.errors import ShardlabError
from shardlab.matrix import batch_search
from shardlab.matrix.batch_search import BatchSearch
from shardlab.matrix.cell import Cell
from shardlab.runs import search_path
from shardlab.runs.rundir import RunDir
from shardlab.runs.search_path import SearchPath
from shardlab.runs.state import FINAL_STATES
from shardlab.workspace.workspace import Workspace

# The most seconds between the end of a try and the start of the next try: much longer than a process needs to start. If there
# is no next try after this time, the process of the search was killed.
BETWEEN_TRIES_S = 30.0
POLL_S = 0.2


def read_search_paths(workspace: Workspace, statuses: Iterable[Status]) -> list[SearchPath]:
    """The path of each search to which at least one of these runs belongs, in the order of the runs. A path is the tries of a
    search so far, and the next try."""
    path_by_search: dict[tuple[str, str, int], SearchPath] = {}
    for status in statuses:
        if status.search is None or status.cell is None or status.repeat is None:
            continue
        cell = msgspec.convert(status.cell, Cell)
        search_key = (batch_search.compute_search_hash(cell), status.search.goal, status.repeat)
        if search_key not in path_by_search:
            path_by_search[search_key] = search_path.follow_search(workspace.runs, cell, status.search, status.repeat)
    return list(path_by_search.values())


def describe_search(path: SearchPath) -> str:
    """A sentence that says what a search tried, and what it found or how many tries may follow."""
    search_name = path.cell.name() if path.repeat == 1 else f"{path.cell.name()}, repeat {path.repeat}"
    outcome_clause = f": {path.answer_text}" if path.has_ended else f"; at most {path.search.most_tries} tries"
    return f"search of {path.search.description} ({search_name}): {path.description}{outcome_clause}."


def make_search_document(path: SearchPath) -> dict[str, Any]:
    """A search as a dictionary, for JSON output."""
    return {
        "cell": path.cell.name(),
        "repeat": path.repeat,
        "search": path.search.to_json_fields(),
        "tries": path.tries,
        "next": path.next_size,
        "has_ended": path.has_ended,
        "best": path.best,
    }


def add_tries(workspace: Workspace, run_dirs: Sequence[RunDir]) -> list[RunDir]:
    """The given run folders, and the folders of all other tries of the searches to which these runs belong.

    Between two tries of a search, this function waits until the next try has a folder. So a search that goes on always has a
    run that has not ended.
    """
    folders_by_id = {run_dir.run_id: run_dir for run_dir in run_dirs}
    for run_dir in run_dirs:
        path = _read_path(workspace, run_dir)
        while path is not None and _is_between_tries(workspace, path):
            time.sleep(POLL_S)
            path = _read_path(workspace, run_dir)
        for search_try in path.tries if path is not None else ():
            folders_by_id.setdefault(search_try.run, RunDir(workspace.runs / search_try.run))
    return list(folders_by_id.values())


def find_stopped_searches(workspace: Workspace, statuses: Sequence[Status]) -> list[SearchPath]:
    """The searches of these runs that were interrupted: they need a next try, but no process starts it."""
    if any(status.state not in FINAL_STATES for status in statuses):
        return []
    return [path for path in read_search_paths(workspace, statuses) if path.next_size is not None]


def _read_path(workspace: Workspace, run_dir: RunDir) -> SearchPath | None:
    """The path of the search to which a run belongs; None if the run belongs to no search or cannot be read."""
    try:
        run = run_dir.read_run()
        search: BatchSearch | None = run.search
        return None if search is None else search_path.follow_search(workspace.runs, run.training_cell, search, run.repeat)
    except ShardlabError:
        return None


def _is_between_tries(workspace: Workspace, path: SearchPath) -> bool:
    """Whether the last try of a search has ended so recently that the next try may begin at any moment."""
    if path.next_size is None or not path.tries:
        return False
    events = RunDir(workspace.runs / path.tries[-1].run).read_events()
    last_end_s = max((event.wall_s for event in events if event.event == "exited"), default=0.0)
    return 0 <= time.time() - last_end_s < BETWEEN_TRIES_S
