"""Short names of cells and runs, which tables show beside the ids and every verb accepts: `c3` is the third cell of a matrix,
`c3.2` the second repeat of this cell, and the beginning of an id is enough if only one cell begins with it.

The number of a cell is its place in the matrix as it was last submitted or rendered in the workspace: the last matrix, or that
of --matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from shardlab.errors import InputError, UnknownName
from shardlab.runs.run import parse_run_id, split_attempt
from shardlab.terminal.table import Column, Row

MOST_CANDIDATES = 8  # the most names that a sentence about an ambiguous name lists
_NUMBER_AT_END = re.compile(r"-[ra][0-9]+\Z")  # of a repeat or an attempt
_HANDLE = re.compile(r"(c[1-9][0-9]*)(?:\.([1-9][0-9]*))?")
HEADING = "#"  # of the column with the handles


def make_handle_column(find_handle: Callable[[Row], str]) -> Column[Row]:
    """The column of a table with the handles. find_handle: returns the handle of a row."""
    return Column(HEADING, find_handle, is_number=False)


def number_cells(cell_ids: Iterable[str]) -> dict[str, str]:
    """The handle of each cell of a matrix, by the id of the cell. cell_ids: of all cells, in the order of the matrix."""
    return {cell_id: f"c{number}" for number, cell_id in enumerate(cell_ids, 1)}


def make_handle(run_id: str, handle_by_cell: Mapping[str, str]) -> str:
    """The handle of a run, such as `c3.2`; "" if the matrix does not have its cell. handle_by_cell: as `number_cells` returns
    them."""
    id_parts = parse_run_id(run_id)
    return (
        f"{handle_by_cell[id_parts.cell_name]}.{id_parts.repeat}" if id_parts and id_parts.cell_name in handle_by_cell else ""
    )


def find_cell_id(cell_name: str, handle_by_cell: Mapping[str, str]) -> str:
    """The id of the cell that a handle names; any other name is returned unchanged. Raises InputError if the matrix has fewer
    cells than the number of the handle."""
    handle_match = _HANDLE.fullmatch(cell_name)
    if handle_match is None or handle_match[2]:
        return cell_name
    cell_id = next((cell_id for cell_id, handle in handle_by_cell.items() if handle == cell_name), None)
    if cell_id is None:
        allowed_text = (
            f"c1 to c{len(handle_by_cell)}, or an id" if handle_by_cell else "an id, because no matrix was submitted here"
        )
        raise InputError(f"{cell_name}: the last matrix (or that of --matrix) has no such cell. Allowed: {allowed_text}.")
    return cell_id


def match_run_ids(run_ids: Iterable[str], patterns: Iterable[str], handle_by_cell: Mapping[str, str]) -> list[str]:
    """The ids of the runs that have at least one of these names: a run id, a shell pattern such as `ddp-*`, a handle, or the
    beginning of the ids of one cell. A handle or a beginning stands for the last attempts.

    Raises InputError for a name that no run has, or that is the beginning of several cells.
    """
    all_ids = list(run_ids)
    matching_ids: set[str] = set()
    for pattern in patterns:
        matching_ids.update(
            [run_id for run_id in all_ids if fnmatchcase(run_id, pattern)]
            or _find_by_short_name(all_ids, pattern, handle_by_cell)
        )
    return [run_id for run_id in all_ids if run_id in matching_ids]


def _find_by_short_name(all_ids: list[str], name: str, handle_by_cell: Mapping[str, str]) -> list[str]:
    """The last attempts of the runs that a handle or the beginning of an id names. Raises InputError."""
    if (handle_match := _HANDLE.fullmatch(name)) is not None:
        cell_id = find_cell_id(handle_match[1], handle_by_cell)
        cell_runs = _select_last_attempts(
            run_id for run_id in all_ids if (id_parts := parse_run_id(run_id)) and id_parts.cell_name == cell_id
        )
        run_ids = [run_id for run_id in cell_runs if handle_match[2] is None or make_handle(run_id, handle_by_cell) == name]
        if not run_ids:
            allowed_text = (
                ", ".join(make_handle(run_id, handle_by_cell) for run_id in cell_runs[:MOST_CANDIDATES]) or "another cell"
            )
            raise InputError(f"{name}: the cell {cell_id} has no such run in this workspace. Allowed: {allowed_text}.")
        return run_ids
    # the beginning ...-r1 is not that of ...-r10
    run_ids = _select_last_attempts(
        run_id
        for run_id in all_ids
        if name
        and run_id.startswith(name)
        and not (_NUMBER_AT_END.search(name) and run_id[len(name) : len(name) + 1].isdigit())
    )
    cell_ids = list(dict.fromkeys(id_parts.cell_name if (id_parts := parse_run_id(run_id)) else run_id for run_id in run_ids))
    if not run_ids:
        raise UnknownName("run", name, all_ids)
    if len(cell_ids) > 1:
        candidates = ", ".join(f"{handle_by_cell.get(cell_id, '')} {cell_id}".strip() for cell_id in cell_ids[:MOST_CANDIDATES])
        rest_clause = ", ..." if len(cell_ids) > MOST_CANDIDATES else ""
        raise InputError(
            f"{name!r} is the beginning of {len(cell_ids)} cells: {candidates}{rest_clause}. Allowed: one of these, a longer "
            f"beginning, or the pattern '{name}*' for all."
        )
    return run_ids


def _select_last_attempts(run_ids: Iterable[str]) -> list[str]:
    """The last attempt at each of these runs, sorted by the id of the first attempt."""
    return list({split_attempt(run_id)[0]: run_id for run_id in sorted(run_ids, key=split_attempt)}.values())
