"""Finds claims and printed numbers of a matrix file that its cells cannot decide: a claim whose sentence names a strategy or
workload that its test does not compare, or has two bounds where its test has one, and metrics that need an instrument which the
cells do not have.

Sentences are texts, so these are hints in the output of `jobs plan` and no errors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shardlab.matrix import cell_names, metric_names
from shardlab.matrix.cell import AnyCell, Instruments
from shardlab.matrix.expression import Expression
from shardlab.matrix.matrix import MatrixFile

_NAME = re.compile(r"[A-Za-z]+(?:-?\d+)*")
_NUMBER = r"(?:\d+(?:[.,]\d+)*|(?:two|three|four|five|six|seven|eight|nine|ten)\b)"
_UNIT = r"\s*(?:%|×|(?:x|times|percent|percentage|points?|ms|s|seconds|minutes|hours|[KMGT]i?B)\b)"
# What has two bounds in a sentence: a range, a number that is only near, and words for equal.
_TWO_BOUNDS = re.compile(
    rf"{_NUMBER}(?:{_UNIT})?\s*(?:to|-|–)\s*{_NUMBER}{_UNIT}|between\s+{_NUMBER}(?:{_UNIT})?\s+and\s+{_NUMBER}(?:{_UNIT})?"
    rf"|\d*\.\d+\s*(?:to|-|–)\s*\d*\.\d+"
    rf"|(?:(?:about|approximately|roughly|almost|nearly|near)\s+|~\s*)(?:{_NUMBER}{_UNIT}|twice|half|double)"
    r"|\b(?:equals?|constant|comparable|as much as)\b",
    re.IGNORECASE,
)
_BEGINNING_BY_NAME = {"deepspeed": "zero"}  # a name in sentences -> the beginning of the names of the strategies


def lint_claims(file: MatrixFile, cells: Sequence[AnyCell]) -> list[str]:
    """The hints on a matrix file, one sentence each. cells: all cells of the matrix, or their tiny twins."""
    cells = [cell.rehearses or cell for cell in cells]
    all_values = (
        [cell_names.map_cell_values(msgspec.to_builtins(cell)) for cell in cells] if file.claims or file.reported else []
    )

    def select_cells(selector: Mapping[str, Any]) -> list[AnyCell]:
        cell_filter = {name: value for name, value in selector.items() if name not in cell_names.METRIC_ARGUMENTS}
        return [cell for cell, values in zip(cells, all_values, strict=True) if cell_names.has_values(values, cell_filter)]

    hints = []
    for claim in file.claims:
        metric_cells = [(metric, select_cells(selector)) for metric, selector in Expression(claim.test).call_arguments]
        compared_cells = [cell for _, selected_cells in metric_cells for cell in selected_cells]
        for uncompared_name in _find_uncompared_names(claim.says, cells, compared_cells):
            hints.append(f"claim {claim.id}: its sentence names {uncompared_name}, and its test compares no cell of it.")
        if (two_bounds := _TWO_BOUNDS.search(claim.says)) and not _has_two_bounds(Expression(claim.test).syntax_tree):
            clause = f"its sentence has two bounds ({two_bounds[0]}), and its test bounds no number from below and from above"
            hints.append(f"claim {claim.id}: {clause}.")
        hints += _find_missing_instruments(f"claim {claim.id}", metric_cells)
    for number in file.reported:
        number_cells = [(number.metric, select_cells(selector)) for selector in (number.cell, number.against) if selector]
        hints += _find_missing_instruments(f"reported {number.printed} ({number.where})", number_cells)
    return list(dict.fromkeys(hints))


def _find_uncompared_names(sentence: str, cells: Sequence[AnyCell], compared_cells: Sequence[AnyCell]) -> list[str]:
    """The names of strategies and workloads in a sentence of which no compared cell is. Names have two capital letters, so that
    `single` in `a single node` is none. cells: all cells; only names that some of them have are looked for."""
    uncompared_names = []
    for name in dict.fromkeys(_NAME.findall(sentence)):
        if sum(letter.isupper() for letter in name) < 2:
            continue
        plain_name = name.lower().replace("-", "")
        beginnings = (_BEGINNING_BY_NAME.get(plain_name, plain_name), plain_name.rstrip("0123456789"))
        used_beginning = next((start for start in beginnings if start and any(_has_name(cell, start) for cell in cells)), None)
        if used_beginning and not any(_has_name(cell, used_beginning) for cell in compared_cells):
            uncompared_names.append(name)
    return uncompared_names


def _has_name(cell: AnyCell, beginning: str) -> bool:
    """Whether the strategy or workload of a cell, or a later part of it such as `pp` of tp-pp, has this beginning."""
    split_names = [name.split("-") for name in (cell.strategy, cell.workload)]
    return any("".join(words[start:]).startswith(beginning) for words in split_names for start in range(len(words)))


def _has_two_bounds(test: ast.expr) -> bool:
    """Whether a test compares a number with a lower and an upper bound, of which one or both have a constant factor, or tests
    whether two values are equal."""
    # a number -> {whether a bound is an upper one: whether it has a constant}
    kinds_by_number: dict[str, dict[bool, bool]] = {}
    for node in ast.walk(test):
        if not isinstance(node, ast.Compare):
            continue
        compared_expressions = [node.left, *node.comparators]
        for left, comparison, right in zip(compared_expressions, node.ops, compared_expressions[1:], strict=False):
            if isinstance(comparison, ast.Eq):
                return True
            is_less = isinstance(comparison, ast.Lt | ast.LtE)
            for number, bound, is_upper in ((left, right, is_less), (right, left, not is_less)):
                kinds = kinds_by_number.setdefault(ast.dump(number), {})
                kinds[is_upper] = kinds.get(is_upper, False) or _has_constant(bound)
                if isinstance(number, ast.BinOp) and isinstance(number.op, ast.Div | ast.Sub):  # a / b < 1.1 bounds b / a too
                    inverse = ast.dump(ast.BinOp(number.right, number.op, number.left))
                    kinds_by_number.setdefault(inverse, {}).setdefault(not is_upper, _has_constant(bound))
    return any(len(kinds) == 2 and any(kinds.values()) for kinds in kinds_by_number.values())


def _has_constant(node: ast.AST) -> bool:
    """Whether an expression has a constant outside of calls."""
    if isinstance(node, ast.Constant | ast.Call):
        return isinstance(node, ast.Constant)
    return any(map(_has_constant, ast.iter_child_nodes(node)))


def _find_missing_instruments(question_name: str, metric_cells: Sequence[tuple[str, Sequence[AnyCell]]]) -> list[str]:
    """A hint for each metric of which a cell lacks the instrument. question_name: the claim or number. cells_of_metrics:
    metrics with their cells."""
    hints = []
    for metric, cells in metric_cells:
        instrument = metric_names.INSTRUMENTS.get(metric)
        if instrument and (lacking_cells := [cell for cell in cells if not has_instrument(cell.instruments, instrument)]):
            hints.append(f"{question_name}: {metric} of {lacking_cells[0].name()} needs `{instrument}` in its `instruments`.")
    return hints


def has_instrument(instruments: Instruments, instrument: str) -> bool:
    """Whether a cell with these instruments has an instrument of metric_names.INSTRUMENTS."""
    if instrument == metric_names.CATEGORIES:
        return instruments.memory == "categories"
    return getattr(instruments, instrument) is not None
