"""Selects runs by ids, shell patterns, a matrix, or an expression (--where), and cells by an expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jobs.status.reconcile import Status, read_statuses, select_last_attempts
from shardlab.errors import InputError
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.cell_names import map_cell_values
from shardlab.matrix.expansion import ExpandedCell
from shardlab.matrix.expression import Expression, ExpressionError
from shardlab.runs import search_path
from shardlab.runs.run import split_attempt
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace


def select_runs(workspace: Workspace, patterns: Sequence[str], matrix: str | None, where: str | None) -> list[Status]:
    """The status of the last attempt of each selected run. Earlier attempts are included only if a pattern names them.

    patterns: names that `Workspace.match_runs` accepts; empty: all runs. matrix: only runs of this matrix. where: only runs for
    which this expression is true. A run whose records cannot be read is always included, because `where` cannot be evaluated
    for this run.
    """
    all_run_ids = workspace.list_run_ids()
    if matrix is not None:
        matrix_run_ids = {
            run_id for cell in workspace.read_expansion(matrix).cells for run_id in _list_run_ids(workspace, cell)
        }
        all_run_ids = [run_id for run_id in all_run_ids if split_attempt(run_id)[0] in matrix_run_ids]
    if patterns:
        run_dirs = [RunDir(workspace.runs / run_id) for run_id in workspace.match_runs(patterns, matrix, all_run_ids)]
    else:
        run_dirs = select_last_attempts(RunDir(workspace.runs / run_id) for run_id in all_run_ids)
    last_statuses = read_statuses(workspace, run_dirs, matrix)
    if where is None:
        return last_statuses
    parsed_condition = parse_condition(where)

    def is_selected(run: Status) -> bool:
        return run.cell is None or _is_true_for_values(
            parsed_condition, map_cell_values(run.cell) | {"state": run.state, "id": run.id}
        )

    return [run for run in last_statuses if is_selected(run)]


def _list_run_ids(workspace: Workspace, cell: ExpandedCell) -> list[str]:
    """The ids of the first attempts of the runs of a cell, and of the further tries if its batch size is searched."""
    if cell.search is None:
        return cell.runs
    search_paths = (
        search_path.follow_search(workspace.runs, cell.cell.require_training(), cell.search, repeat)
        for repeat in range(1, len(cell.runs) + 1)
    )
    return [*cell.runs, *(split_attempt(search_try.run)[0] for path in search_paths for search_try in path.tries)]


def parse_condition(where: str) -> Expression:
    """Parse the expression of --where. Raises InputError."""
    try:
        return Expression(where)
    except ExpressionError as error:
        raise InputError(f"--where: {error}.") from None


def is_true_for_cell(expression: Expression, cell: AnyCell) -> bool:
    """Whether an expression over cell keys is true for a cell; for a tiny twin, the cell that the twin rehearses is tested.

    Raises InputError if the expression has a name that no cell has.
    """
    return _is_true_for_values(expression, map_cell_values(msgspec.to_builtins(cell.rehearses or cell)))


def _is_true_for_values(expression: Expression, values: dict[str, Any]) -> bool:
    try:
        return bool(expression.evaluate(values))
    except ExpressionError as error:
        raise InputError(f"--where: {error}.") from None
