"""The tries of a search in a workspace, in the order in which they were made, and what the search does next."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardlab import batch_search
from shardlab.batch_search import BatchSearch, TryOutcome
from shardlab.cell import Cell
from shardlab.errors import ShardlabError
from shardlab.run import run_id
from shardlab.rundir import RunDir
from shardlab.state import JudgedState


class SearchTry(msgspec.Struct, frozen=True):
    """A try of a search: a run of a cell with this batch size.

    size: units of data per data-parallel rank and step. run: the id of its last attempt. throughput: units of data per second;
    None if the run did not complete.
    """

    size: int
    run: str
    state: str
    why: str
    throughput: float | None = None


class SearchPath(msgspec.Struct, frozen=True):
    """A search in a workspace, by the records of its runs.

    cell: the cell of the first try. tries: in the order of the search. Each of them completed or was out of memory, but for the
    last, on which the search may wait. following: the size of the next try, which has no folder yet; None if the search waits
    for its last try, or has ended.
    """

    cell: Cell
    search: BatchSearch
    repeat: int
    tries: list[SearchTry]
    following: int | None

    @property
    def outcomes(self) -> dict[int, TryOutcome]:
        """How the tries ended that completed or were out of memory, by their sizes."""
        return {one.size: outcome for one in self.tries if (outcome := _outcome(one)) is not None}

    @property
    def has_ended(self) -> bool:
        """Whether the search needs no further try."""
        return self.following is None and len(self.outcomes) == len(self.tries) > 0

    @property
    def best(self) -> int | None:
        """The answer of a search that has ended: a batch size, or None if no size fits. None also while it goes on."""
        return batch_search.best_size(self.search, self.outcomes) if self.has_ended else None

    @property
    def current(self) -> Cell:
        """The cell of the next try, or of the last try if there is no next."""
        return batch_search.try_cell(self.cell, self.following if self.following is not None else self.tries[-1].size)

    @property
    def answer(self) -> str:
        """The answer in words, such as `the largest that fits is 24`; '' while the search goes on."""
        if not self.has_ended:
            return ""
        if self.best is None:
            return f"no size fits, not even {self.search.smallest}"
        bound = ", and larger sizes were not tried" if self.best == self.search.largest else ""
        return f"{batch_search.GOAL_WORDS[self.search.goal]} is {self.best}{bound}"

    @property
    def in_words(self) -> str:
        """The sizes that were tried with their states, such as `16 completed, 32 oom, 24 running`."""
        steps = [f"{one.size} {one.state}" for one in self.tries]
        return ", ".join([*steps, *([f"next {self.following}"] if self.following is not None else [])])


def walk(runs: Path, cell: Cell, search: BatchSearch, repeat: int) -> SearchPath:
    """Follow a search through the run folders of a workspace.

    runs: the folder of all runs. cell: the cell of any try. repeat: the number of the search among the repeats of its cell.
    """
    first = batch_search.try_cell(cell, search.start)
    path = SearchPath(first, search, repeat, [], search.start)
    while path.following is not None:
        last = _read(runs, batch_search.try_cell(first, path.following), path.following, repeat)
        if last is None:
            break
        tries = [*path.tries, last]
        path = SearchPath(first, search, repeat, tries, None)
        if _outcome(last) is None:
            break
        path = SearchPath(first, search, repeat, tries, batch_search.next_size(search, path.outcomes))
    return path


def _outcome(one: SearchTry) -> TryOutcome | None:
    """What a try says about its size; None if it says nothing, because it did not end or ended for another reason."""
    if one.state == "completed":
        return TryOutcome(True, one.throughput or 0.0)
    return TryOutcome(False) if one.state == "oom" else None


def _read(runs: Path, cell: Cell, size: int, repeat: int) -> SearchTry | None:
    """The try of this cell by the records of its last attempt; None if it has no folder."""
    attempt = 1
    if not (runs / run_id(cell, repeat)).is_dir():
        return None
    while (runs / run_id(cell, repeat, attempt + 1)).is_dir():
        attempt += 1
    folder = RunDir(runs / run_id(cell, repeat, attempt))
    result = None
    try:
        verdict, result = folder.told(folder.events(strict=True))
    except ShardlabError as error:
        verdict = JudgedState("unknown", str(error))
    throughput = result.throughput_per_s if result is not None and verdict.state == "completed" else None
    return SearchTry(size, folder.run_id, verdict.state, verdict.why, throughput)
