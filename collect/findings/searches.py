"""Makes the table of the searches for a batch size: what each search found, and the sizes that it tried."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collect.findings import columns
from collect.findings.row import flatten_cell
from shardlab.matrix import batch_search
from shardlab.runs.search_path import SearchPath, SearchTry

_BATCH_KEYS = ("global_batch_size", "micro_batch_size")  # cell keys that differ between the tries of a search


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


def list_search_results(search_paths: Sequence[SearchPath]) -> list[SearchResult]:
    """The result of each search that has at least one try, in the order of `search_paths`."""
    started_paths = [path for path in search_paths if path.tries]
    flat_cells = [flatten_cell(msgspec.to_builtins(path.cell)) for path in started_paths]
    cells_without_batch = [{key: value for key, value in cell.items() if key not in _BATCH_KEYS} for cell in flat_cells]
    cell_names = columns.make_cell_labels(cells_without_batch) if cells_without_batch else []
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
        for path, name in zip(started_paths, cell_names, strict=True)
    ]
