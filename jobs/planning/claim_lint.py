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
_OTHER_NAMES = {"deepspeed": "zero"}  # a name in sentences -> the beginning of the names of the strategies


def lint_claims(file: MatrixFile, cells: Sequence[AnyCell]) -> list[str]:
    """The hints on a matrix file, one sentence each. cells: all cells of the matrix, or their tiny twins."""
    cells = [cell.rehearses or cell for cell in cells]
    values = [cell_names.map_cell_values(msgspec.to_builtins(cell)) for cell in cells] if file.claims or file.reported else []

    def select(selector: Mapping[str, Any]) -> list[AnyCell]:
        names = {name: value for name, value in selector.items() if name not in cell_names.METRIC_ARGUMENTS}
        return [cell for cell, cell_values in zip(cells, values, strict=True) if cell_names.has_values(cell_values, names)]

    hints = []
    for claim in file.claims:
        calls = [(metric, select(selector)) for metric, selector in Expression(claim.test).call_arguments]
        compared = [cell for _, selected in calls for cell in selected]
        for name in _find_missing_names(claim.says, cells, compared):
            hints.append(f"claim {claim.id}: its sentence names {name}, and its test compares no cell of it.")
        if (two_bounds := _TWO_BOUNDS.search(claim.says)) and not _has_two_bounds(Expression(claim.test).syntax_tree):
            words = f"its sentence has two bounds ({two_bounds[0]}), and its test bounds no number from below and from above"
            hints.append(f"claim {claim.id}: {words}.")
        hints += _find_missing_instruments(f"claim {claim.id}", calls)
    for entry in file.reported:
        numbers = [(entry.metric, select(selector)) for selector in (entry.cell, entry.against) if selector]
        hints += _find_missing_instruments(f"reported {entry.printed} ({entry.where})", numbers)
    return list(dict.fromkeys(hints))


def _find_missing_names(sentence: str, cells: Sequence[AnyCell], compared: Sequence[AnyCell]) -> list[str]:
    """The names of strategies and workloads in a sentence of which no compared cell is. Names have two capital letters, so that
    `single` in `a single node` is none. cells: all cells; only names that some of them have are looked for."""
    missing = []
    for name in dict.fromkeys(_NAME.findall(sentence)):
        if sum(letter.isupper() for letter in name) < 2:
            continue
        plain = name.lower().replace("-", "")
        beginnings = (_OTHER_NAMES.get(plain, plain), plain.rstrip("0123456789"))
        used_beginning = next((start for start in beginnings if start and any(_has_name(cell, start) for cell in cells)), None)
        if used_beginning and not any(_has_name(cell, used_beginning) for cell in compared):
            missing.append(name)
    return missing


def _has_name(cell: AnyCell, beginning: str) -> bool:
    """Whether the strategy or workload of a cell, or a later part of it such as `pp` of tp-pp, has this beginning."""
    parts = [name.split("-") for name in (cell.strategy, cell.workload)]
    return any("".join(words[start:]).startswith(beginning) for words in parts for start in range(len(words)))


def _has_two_bounds(test: ast.expr) -> bool:
    """Whether a test compares a number with a lower and an upper bound, of which one or both have a constant factor, or tests
    whether two values are equal."""
    bounds: dict[str, dict[bool, bool]] = {}  # a number -> {whether a bound is an upper one: whether it has a constant}
    for node in ast.walk(test):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if isinstance(operator, ast.Eq):
                return True
            is_upper = isinstance(operator, ast.Lt | ast.LtE)
            for number, other, upper in ((left, right, is_upper), (right, left, not is_upper)):
                kinds = bounds.setdefault(ast.dump(number), {})
                kinds[upper] = kinds.get(upper, False) or _has_constant(other)
                if isinstance(number, ast.BinOp) and isinstance(number.op, ast.Div | ast.Sub):  # a / b < 1.1 bounds b / a too
                    inverse = ast.dump(ast.BinOp(number.right, number.op, number.left))
                    bounds.setdefault(inverse, {}).setdefault(not upper, _has_constant(other))
    return any(len(kinds) == 2 and any(kinds.values()) for kinds in bounds.values())


def _has_constant(node: ast.AST) -> bool:
    """Whether an expression has a constant outside of calls."""
    if isinstance(node, ast.Constant | ast.Call):
        return isinstance(node, ast.Constant)
    return any(map(_has_constant, ast.iter_child_nodes(node)))


def _find_missing_instruments(owner: str, calls: Sequence[tuple[str, Sequence[AnyCell]]]) -> list[str]:
    """A hint for each metric of which a cell lacks the instrument. owner: the claim or number. calls: metrics with their
    cells."""
    hints = []
    for metric, selected in calls:
        instrument = metric_names.INSTRUMENTS.get(metric)
        if instrument and (lacking := [cell for cell in selected if not has_instrument(cell.instruments, instrument)]):
            hints.append(f"{owner}: {metric} of {lacking[0].name()} needs `{instrument}` in its `instruments`.")
    return hints


def has_instrument(instruments: Instruments, instrument: str) -> bool:
    """Whether a cell with these instruments has an instrument of metric_names.INSTRUMENTS."""
    if instrument == metric_names.CATEGORIES:
        return instruments.memory == "categories"
    return getattr(instruments, instrument) is not None
