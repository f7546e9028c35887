"""Reads how far a search for a batch size has come: its tries in the order in which they were made, and the next try."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardlab.errors import ShardlabError
from shardlab.matrix import batch_search
from shardlab.matrix.batch_search import BatchSearch, TryOutcome
from shardlab.matrix.cell import Cell
from shardlab.runs.run import make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import JudgedState


class SearchTry(msgspec.Struct, frozen=True):
    """A try of a search: a run of a cell with this batch size."""

    size: int
    """Units of data per data-parallel rank and step."""
    run: str
    """The id of its last attempt."""
    state: str
    why: str
    throughput: float | None = None
    """Units of data per second; None if the run did not complete."""


class SearchPath(msgspec.Struct, frozen=True):
    """How far a search for a batch size has come, according to the records of its runs."""

    cell: Cell
    """The cell of the first try."""
    search: BatchSearch
    repeat: int
    """The number of the search among the repeats of its cell."""
    tries: list[SearchTry]
    """The tries in the order of the search. All except the last completed or ran out of memory; the last may be running."""
    next_size: int | None
    """The batch size of the next try, which has no run folder yet; None if the search waits for its last try, or has ended."""

    @property
    def outcome_by_size(self) -> dict[int, TryOutcome]:
        """For each try that completed or ran out of memory: its batch size -> how it ended."""
        return {search_try.size: outcome for search_try in self.tries if (outcome := _judge_try(search_try)) is not None}

    @property
    def has_ended(self) -> bool:
        """Whether the search needs no further try."""
        return self.next_size is None and len(self.outcome_by_size) == len(self.tries) > 0

    @property
    def best(self) -> int | None:
        """The batch size that the search found; None if no size fits, or if the search has not ended."""
        return batch_search.find_best_size(self.search, self.outcome_by_size) if self.has_ended else None

    @property
    def current_cell(self) -> Cell:
        """The cell of the next try; if there is no next try, the cell of the last try."""
        return batch_search.try_cell(self.cell, self.next_size if self.next_size is not None else self.tries[-1].size)

    @property
    def answer_text(self) -> str:
        """The result of the search in words, such as `the largest that fits is 24`; empty if the search has not ended."""
        if not self.has_ended:
            return ""
        if self.best is None:
            return f"no size fits, not even {self.search.smallest}"
        bound_note = ", and larger sizes were not tried" if self.best == self.search.largest else ""
        return f"{batch_search.GOAL_WORDS[self.search.goal]} is {self.best}{bound_note}"

    @property
    def description(self) -> str:
        """The batch sizes that were tried, with the states of their runs, such as `16 completed, 32 oom, 24 running`."""
        try_texts = [f"{search_try.size} {search_try.state}" for search_try in self.tries]
        return ", ".join([*try_texts, *([f"next {self.next_size}"] if self.next_size is not None else [])])


def follow_search(runs_folder: Path, cell: Cell, search: BatchSearch, repeat: int) -> SearchPath:
    """Follow a search through the run folders of a workspace.

    runs_folder: the folder of all runs. cell: the cell of any try of the search. repeat: the number of the search among the
    repeats of its cell, because each repeat is a search of its own.
    """
    first_cell = batch_search.try_cell(cell, search.start)
    path = SearchPath(first_cell, search, repeat, [], search.start)
    while path.next_size is not None:
        last_try = _read_try(runs_folder, batch_search.try_cell(first_cell, path.next_size), path.next_size, repeat)
        if last_try is None:
            break
        all_tries = [*path.tries, last_try]
        path = SearchPath(first_cell, search, repeat, all_tries, None)
        if _judge_try(last_try) is None:
            break
        path = SearchPath(first_cell, search, repeat, all_tries, batch_search.choose_next_size(search, path.outcome_by_size))
    return path


def _judge_try(search_try: SearchTry) -> TryOutcome | None:
    """Whether the batch size of a try fits, and its throughput; None if the try neither completed nor ran out of memory."""
    if search_try.state == "completed":
        return TryOutcome(True, search_try.throughput or 0.0)
    return TryOutcome(False) if search_try.state == "oom" else None


def _read_try(runs_folder: Path, cell: Cell, batch_size: int, repeat: int) -> SearchTry | None:
    """Read the try with this cell and batch size from the run folder of its last attempt; None if it has no run folder."""
    attempt = 1
    if not (runs_folder / make_run_id(cell, repeat)).is_dir():
        return None
    while (runs_folder / make_run_id(cell, repeat, attempt + 1)).is_dir():
        attempt += 1
    run_dir = RunDir(runs_folder / make_run_id(cell, repeat, attempt))
    run_result = None
    try:
        judged_state, run_result = run_dir.judge_with_result(run_dir.read_events(strict=True))
    except ShardlabError as error:
        judged_state = JudgedState("unknown", str(error))
    throughput_per_s = run_result.throughput_per_s if run_result is not None and judged_state.state == "completed" else None
    return SearchTry(batch_size, run_dir.run_id, judged_state.state, judged_state.why, throughput_per_s)
