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
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.expression import Expression, ExpressionError
from shardlab.matrix.study import Claim, PrintedTable

MOST_LISTED = 12  # largest number of values that a message lists
MOST_QUOTED_WORDS = 30  # a longer quote would be a copy of the study


def find_claim_problems(document: Document, test_texts: Sequence[str], reported_metrics: Sequence[str]) -> list[Problem]:
    """Find wrong tests of claims and unknown metrics of reported numbers, as far as this is possible without the cells.

    document: the matrix file. test_texts: the test of each claim. reported_metrics: the metric of each reported number.
    """
    problems = []
    for index, test_text in enumerate(test_texts):
        try:
            _check_test(Expression(test_text))
        except (ExpressionError, UnknownName) as error:
            problems.append(document.problem(("claims", index, "test"), f"{str(error).rstrip('.')}."))
    for index, metric in enumerate(reported_metrics):
        if metric not in metric_names.KNOWN_METRICS:
            sentence = str(UnknownName("metric", metric, metric_names.KNOWN_METRICS))
            problems.append(document.problem(("reported", index, "metric"), sentence))
    return problems


def find_long_quotes(document: Document, claims: Sequence[Claim]) -> list[Problem]:
    """A problem for each claim whose quote has too many words. document: the matrix file."""
    word_count_by_index = {index: len(claim.quote.split()) for index, claim in enumerate(claims)}
    return [
        document.problem(("claims", index, "quote"), f"found {count} words. Allowed: {MOST_QUOTED_WORDS} or fewer.")
        for index, count in word_count_by_index.items()
        if count > MOST_QUOTED_WORDS
    ]


def find_table_problems(document: Document, tables: Sequence[PrintedTable]) -> list[Problem]:
    """Find rows of tables without a text for each column, and keys and metrics of tables that do not exist.

    document: the matrix file. tables: its tables.
    """
    problems = []
    for table_index, table in enumerate(tables):
        for row_index, row in enumerate(table.rows):
            if len(row.texts) != len(table.columns):
                sentence = f"found {len(row.texts)} texts. Allowed: {len(table.columns)}, one for each column."
                problems.append(document.problem(("tables", table_index, "rows", row_index, "texts"), sentence))
            for key in row.cell:
                if not cell_names.is_cell_name(key):
                    sentence = str(UnknownName("name of a resolved cell", key, cell_names.PLAIN_NAMES))
                    problems.append(
                        document.problem(("tables", table_index, "rows", row_index, "cell", key), sentence, at_key=True)
                    )
        for metric_index, metric in enumerate(table.measured):
            if metric not in metric_names.PLAIN_METRICS:
                sentence = str(UnknownName("metric without an argument", metric, metric_names.PLAIN_METRICS))
                problems.append(document.problem(("tables", table_index, "measured", metric_index), sentence))
    return problems


def find_claims_without_cells(
    document: Document, test_texts: Sequence[str], cells: Sequence[AnyCell], excluded_cells: Iterable[dict[str, Any]]
) -> list[Problem]:
    """A problem for each claim whose test names a cell that the matrix neither contains nor excludes.

    document: the matrix file. test_texts: the test of each claim. cells: all cells of the matrix, also cells that the user did
    not select. excluded_cells: the combinations that the matrix excludes."""
    cell_values = [cell_names.map_cell_values(msgspec.to_builtins(cell)) for cell in cells] if test_texts else []
    cell_values += list(excluded_cells)
    problems = []
    for index, test_text in enumerate(test_texts):
        for metric, selected_values in Expression(test_text).call_arguments:
            selected_values = {key: value for key, value in selected_values.items() if key not in cell_names.METRIC_ARGUMENTS}
            if not any(
                all(key in cell and cell[key] == value for key, value in selected_values.items()) for cell in cell_values
            ):
                problems.append(
                    document.problem(("claims", index, "test"), f"{metric}: {_explain_no_cell(cell_values, selected_values)}")
                )
    return problems


def _check_test(test: Expression) -> None:
    """Check the test of a claim. Raises ExpressionError or UnknownName if the test is wrong or uses an unknown name."""
    if test.names:
        name = min(test.names)
        example_text = f", as in {name}(strategy='ddp')" if name in metric_names.KNOWN_METRICS else ""
        raise ExpressionError(f"{name!r} is not a number. Allowed: a metric with the values that select one cell{example_text}")
    if not test.calls:
        raise ExpressionError(f"{test.text!r} names no metric. Allowed: one or more, as in final_loss(strategy='ddp') < 4")
    for metric, arguments in test.call_arguments:
        if metric not in metric_names.KNOWN_METRICS:
            raise UnknownName("metric", metric, metric_names.KNOWN_METRICS)
        needed_argument = metric_names.WITH_ARGUMENT.get(metric)
        for key in arguments:
            if key in cell_names.METRIC_ARGUMENTS and key != needed_argument:
                raise ExpressionError(f"{metric} has no argument {key!r}")
            if not cell_names.is_cell_name(key) and key not in cell_names.METRIC_ARGUMENTS:
                raise UnknownName("name of a resolved cell", key, cell_names.PLAIN_NAMES)
        if needed_argument and needed_argument not in arguments:
            raise ExpressionError(f"{metric} needs {needed_argument}, as in {metric}({needed_argument}=..., strategy='ddp')")


def _explain_no_cell(cells: Sequence[dict[str, Any]], selected_values: dict[str, Any]) -> str:
    """Why no cell has all wanted values. The sentence names a value that no cell has, or says that no cell has all the values
    together.

    cells: the values of each cell, by name. selected_values: the values that a claim names.
    """
    for key, value in selected_values.items():
        cell_values = sorted({str(cell[key]) for cell in cells if key in cell and cell[key] is not None})
        if not cell_values:
            return f"no cell of this matrix has a value of {key}."
        if not any(key in cell and cell[key] == value for cell in cells):
            similar_values = difflib.get_close_matches(str(value), cell_values, n=1)
            suggestion = f" Did you mean {similar_values[0]}?" if similar_values else ""
            ellipsis = ", ..." if len(cell_values) > MOST_LISTED else ""
            return (
                f"no cell of this matrix has {key} {value!r}.{suggestion} Its cells have: "
                f"{', '.join(cell_values[:MOST_LISTED])}{ellipsis}."
            )
    all_values = ", ".join(f"{key} {value!r}" for key, value in selected_values.items())
    return f"no cell of this matrix has all of these values: {all_values}."
