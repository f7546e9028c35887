"""Checks claims, reported numbers and tables when a matrix file is read: the metrics and keys that they name must exist.

Without this check, a wrong name would be found only when `collect verdicts` judges the claims, after all runs have ended.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shardlab.errors import UnknownName
from shardlab.files.document import Document, Problem
from shardlab.matrix import cell_names, metric_names
from shardlab.matrix.cell import Cell
from shardlab.matrix.expression import Expression, ExpressionError
from shardlab.matrix.study import PrintedTable

MOST_LISTED = 12  # largest number of values that a message lists


def problems(text: Document, tests: Sequence[str], reported: Sequence[str]) -> list[Problem]:
    """Find wrong tests of claims and unknown metrics of reported numbers, as far as this is possible without the cells.

    text: the matrix file. tests: the test of each claim. reported: the metric of each reported number.
    """
    problems = []
    for index, test in enumerate(tests):
        try:
            _check(Expression(test))
        except (ExpressionError, UnknownName) as error:
            problems.append(text.problem(("claims", index, "test"), f"{str(error).rstrip('.')}."))
    for index, metric in enumerate(reported):
        if metric not in metric_names.KNOWN:
            sentence = str(UnknownName("metric", metric, metric_names.KNOWN))
            problems.append(text.problem(("reported", index, "metric"), sentence))
    return problems


def table_problems(text: Document, tables: Sequence[PrintedTable]) -> list[Problem]:
    """Find rows of tables without a text for each column, and keys and metrics of tables that do not exist.

    text: the matrix file. tables: its tables.
    """
    problems = []
    for index, table in enumerate(tables):
        for place, row in enumerate(table.rows):
            if len(row.texts) != len(table.columns):
                sentence = f"found {len(row.texts)} texts. Allowed: {len(table.columns)}, one for each column."
                problems.append(text.problem(("tables", index, "rows", place, "texts"), sentence))
            for key in row.cell:
                if not cell_names.is_name(key):
                    sentence = str(UnknownName("name of a resolved cell", key, cell_names.PLAIN))
                    problems.append(text.problem(("tables", index, "rows", place, "cell", key), sentence, at_key=True))
        for place, metric in enumerate(table.measured):
            if metric not in metric_names.PLAIN:
                sentence = str(UnknownName("metric without an argument", metric, metric_names.PLAIN))
                problems.append(text.problem(("tables", index, "measured", place), sentence))
    return problems


def without_cells(
    text: Document, tests: Sequence[str], cells: Sequence[Cell], excluded: Iterable[dict[str, Any]]
) -> list[Problem]:
    """A problem for each claim whose test names a cell that the matrix neither contains nor excludes.

    text: the matrix file. tests: the test of each claim. cells: all cells of the matrix, also cells that the user did not
    select. excluded: the combinations that the matrix excludes.
    """
    known = [cell_names.names(msgspec.to_builtins(cell)) for cell in cells] if tests else []
    known += list(excluded)
    problems = []
    for index, test in enumerate(tests):
        for metric, wanted in Expression(test).filters:
            wanted = {key: value for key, value in wanted.items() if key not in cell_names.ARGUMENTS}
            if not any(all(key in cell and cell[key] == value for key, value in wanted.items()) for cell in known):
                problems.append(text.problem(("claims", index, "test"), f"{metric}: {_why_none(known, wanted)}"))
    return problems


def _check(test: Expression) -> None:
    """Check the test of a claim. Raises ExpressionError or UnknownName if the test is wrong or uses an unknown name."""
    if test.names:
        name = min(test.names)
        near = f", as in {name}(strategy='ddp')" if name in metric_names.KNOWN else ""
        raise ExpressionError(f"{name!r} is not a number. Allowed: a metric with the values that select one cell{near}")
    if not test.calls:
        raise ExpressionError(f"{test.text!r} names no metric. Allowed: one or more, as in final_loss(strategy='ddp') < 4")
    for metric, given in test.filters:
        if metric not in metric_names.KNOWN:
            raise UnknownName("metric", metric, metric_names.KNOWN)
        needs = metric_names.WITH_ARGUMENT.get(metric)
        for key in given:
            if key in cell_names.ARGUMENTS and key != needs:
                raise ExpressionError(f"{metric} has no argument {key!r}")
            if not cell_names.is_name(key) and key not in cell_names.ARGUMENTS:
                raise UnknownName("name of a resolved cell", key, cell_names.PLAIN)
        if needs and needs not in given:
            raise ExpressionError(f"{metric} needs {needs}, as in {metric}({needs}=..., strategy='ddp')")


def _why_none(cells: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> str:
    """Why no cell has all wanted values. The sentence names a value that no cell has, or says that no cell has all the values
    together.

    cells: the values of each cell, by name. wanted: the values that a claim names.
    """
    for key, value in wanted.items():
        values = sorted({str(cell[key]) for cell in cells if key in cell and cell[key] is not None})
        if not values:
            return f"no cell of this matrix has a value of {key}."
        if not any(key in cell and cell[key] == value for cell in cells):
            near = difflib.get_close_matches(str(value), values, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            more = ", ..." if len(values) > MOST_LISTED else ""
            return f"no cell of this matrix has {key} {value!r}.{hint} Its cells have: {', '.join(values[:MOST_LISTED])}{more}."
    together = ", ".join(f"{key} {value!r}" for key, value in wanted.items())
    return f"no cell of this matrix has all of these values: {together}."
