"""The expansion of a matrix: the cells and runs that the matrix had when it was last rendered.

The expansion is stored in .shardlab/matrices/NAME.json, so that commands that only read runs do not need the matrix file.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shardlab.matrix.batch_search import BatchSearch
from shardlab.matrix.cell import AnyCell, convert_to_training_cell
from shardlab.matrix.citation import Citation
from shardlab.matrix.study import Assumed, Claim, Deviation, Note, PrintedTable, Reported, Setting, Traces
from shardlab.record_types import Count, MatrixName, RunId, check_numbers

LAST_MATRIX = "last-matrix.json"  # a file in .shardlab, beside the folder of the expansions


class ExpandedCell(msgspec.Struct, frozen=True):
    """A cell of an expansion. If the batch size of the cell is searched: the cell of the first try."""

    id: RunId
    cell: AnyCell
    runs: list[RunId]
    """For each repeat of the cell, the id of its first attempt."""
    search: BatchSearch | None = None
    """Null: no search; shardlab.runs.search_path finds the tries after the first try."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "cell", convert_to_training_cell(self.cell))


class ExcludedPoint(msgspec.Struct, frozen=True):
    """A combination of keys that the matrix file excludes."""

    cell: dict[str, Any]
    why: str
    """The reason that the file gives."""


class Expansion(msgspec.Struct, kw_only=True):
    """The content of .shardlab/matrices/NAME.json. Files of older versions lack the fields that have a default value below."""

    schema: Count
    name: MatrixName
    title: str
    path: str
    """The path of the matrix file."""
    cells: list[ExpandedCell]
    excluded: list[ExcludedPoint]
    scale: Literal["full", "tiny"] = "full"
    """Tiny: each cell is a tiny twin, whose key `rehearses` is the original cell."""
    reported: list[Reported] = []
    tables: list[PrintedTable] = []
    claims: list[Claim] = []
    settings: list[Setting] = []
    baseline: str = "single"
    traces: Traces = "exact"
    assumed: list[Assumed] = []
    notes: list[Note] = []
    deviations: list[Deviation] = []
    citation: Citation | None = None

    def __post_init__(self) -> None:
        entry_lists = (self.excluded, self.reported, self.tables, self.settings, self.assumed, self.deviations)
        check_numbers(msgspec.to_builtins(entry_lists))


class LastMatrix(msgspec.Struct, frozen=True):
    """The content of last-matrix.json: the name of the matrix that was rendered last."""

    schema: Count
    name: MatrixName
