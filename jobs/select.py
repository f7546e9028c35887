"""Selects runs or cells by ids, shell patterns, a matrix, or an expression over cell keys and state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jobs.reconcile import Status, latest, statuses
from shardlab.cell import Cell
from shardlab.cell_names import names
from shardlab.errors import InputError
from shardlab.expression import Expression, ExpressionError
from shardlab.run import attempt_of
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace, chosen


def select(workspace: Workspace, patterns: Sequence[str], matrix: str | None, where: str | None) -> list[Status]:
    """The status of the last attempt of each selected run; earlier attempts only if a pattern names them.

    A run that is set aside is always included, because `where` cannot be evaluated for it.
    """
    ids = workspace.run_ids()
    if matrix is not None:
        of_matrix = {run_id for cell in workspace.expansion(matrix).cells for run_id in cell.runs}
        ids = [run_id for run_id in ids if attempt_of(run_id)[0] in of_matrix]
    if patterns:
        folders = [RunDir(workspace.runs / run_id) for run_id in chosen(ids, patterns)]
    else:
        folders = latest(RunDir(workspace.runs / run_id) for run_id in ids)
    last = statuses(workspace, folders)
    if where is None:
        return last
    wanted = condition(where)

    def meant(run: Status) -> bool:
        return run.cell is None or _true(wanted, names(run.cell) | {"state": run.state, "id": run.id})

    return [run for run in last if meant(run)]


def condition(where: str) -> Expression:
    """The expression of a --where. Raises InputError."""
    try:
        return Expression(where)
    except ExpressionError as error:
        raise InputError(f"--where: {error}.") from None


def holds(expression: Expression, cell: Cell) -> bool:
    """Whether an expression over cell keys is true of a cell, or of the cell that it stands for.

    Raises InputError for a name that no cell has.
    """
    return _true(expression, names(msgspec.to_builtins(cell.rehearses or cell)))


def _true(expression: Expression, values: dict[str, Any]) -> bool:
    try:
        return bool(expression.evaluate(values))
    except ExpressionError as error:
        raise InputError(f"--where: {error}.") from None
