"""Replaces each cell that has a search for its batch size by one cell for each batch size that the search has tried so far."""

from __future__ import annotations

import msgspec

from shardlab import search_path
from shardlab.batch_search import try_cell
from shardlab.expansion import ExpandedCell, Expansion
from shardlab.search_path import SearchPath
from shardlab.workspace import Workspace


def expanded(workspace: Workspace, expansion: Expansion) -> tuple[Expansion, list[SearchPath]]:
    """Replace the cells that have a search. Returns (the expansion with a cell for each tried batch size, all search paths).

    The cell for a batch size has the runs of all repeats that tried this batch size. There is one search path for each repeat
    of a cell that has a search.
    """
    cells: list[ExpandedCell] = []
    every: list[SearchPath] = []
    for entry in expansion.cells:
        if entry.search is None:
            cells.append(entry)
            continue
        repeats = range(1, len(entry.runs) + 1)
        paths = [search_path.walk(workspace.runs, entry.cell, entry.search, repeat) for repeat in repeats]
        runs: dict[int, list[str]] = {}
        for path in paths:
            for one in path.tries:
                runs.setdefault(one.size, []).append(one.run)
        of_tries = [(try_cell(entry.cell, size), names) for size, names in sorted(runs.items())]
        cells += [ExpandedCell(cell.name(), cell, names, entry.search) for cell, names in of_tries] or [entry]
        every += paths
    return msgspec.structs.replace(expansion, cells=cells), every
