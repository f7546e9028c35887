"""Makes the table of the searches for a batch size: what each search found, and the sizes that it tried."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collect.findings import columns
from collect.findings.row import flatten_cell
from shardlab.matrix import batch_search
from shardlab.runs.search_path import SearchPath, SearchTry

_BATCH = ("global_batch_size", "micro_batch_size")  # cell keys that differ between the tries of a search


class SearchResult(msgspec.Struct):
    """A search of a cell, by the records of its tries."""

    name: str
    """The cell without its batch size, in words."""
    searched: str
    """Which batch size is searched, in words."""
    repeat: int
    """Number of the repeat, from 1."""
    tries: list[SearchTry]
    """In the order of the search."""
    cells: list[str]
    """The id of the cell of each try."""
    best: int | None
    """The batch size that the search found, in items per data-parallel rank and step; None if the search has not ended, or if
    no size fits."""
    says: str
    """The result of the search in words."""

    @property
    def texts(self) -> list[str]:
        """Each try in words, such as `16 completed`."""
        return [f"{search_try.size} {search_try.state}" for search_try in self.tries]

    @property
    def path(self) -> str:
        """The tries of the search in words, such as `16 completed → 32 oom → 24 completed`."""
        return " → ".join(self.texts)


def list_search_results(paths: Sequence[SearchPath]) -> list[SearchResult]:
    """The result of each search that has at least one try, in the order of `paths`."""
    begun_paths = [path for path in paths if path.tries]
    cells = [flatten_cell(msgspec.to_builtins(path.cell)) for path in begun_paths]
    cells_without_batch = [{key: value for key, value in cell.items() if key not in _BATCH} for cell in cells]
    names = columns.cell_labels(cells_without_batch) if cells_without_batch else []
    return [
        SearchResult(
            name=name,
            searched=path.search.description,
            repeat=path.repeat,
            tries=path.tries,
            cells=[batch_search.try_cell(path.cell, search_try.size).name() for search_try in path.tries],
            best=path.best,
            says=path.answer_text or "has not ended",
        )
        for path, name in zip(begun_paths, names, strict=True)
    ]
