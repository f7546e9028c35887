"""Evaluates a test on uncertain numbers: computes in which share of random draws of these numbers the test holds."""

from __future__ import annotations

import ast
import operator
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from typing import Any, TypeGuard

import numpy as np
import polars as pl
from numpy.typing import NDArray

from shardlab.matrix.expression import Evaluator, ExpressionError

DRAW_COUNT = 10_000
SEED = 20_260_101  # the seed of all draws, so that the same records always give the same verdicts
DrawnValues = NDArray[np.float64]  # random draws of an uncertain number, shape (DRAWS,)
CallValue = float | str | DrawnValues  # of a call: an exact number, the state of a cell, or draws of an uncertain number

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def draw_mean(mean_value: float, standard_error: float, freedom_degrees: int, seed_name: str) -> float | DrawnValues:
    """Draw DRAWS random values of an uncertain mean_value: mean + error * t, where t follows Student's t distribution.

    standard_error: the standard error of the mean. freedom_degrees: the degrees of freedom of t. Draws with the same name are
    always the same; draws with different names are independent. If the error is 0, the mean itself is returned."""
    if standard_error == 0:
        return mean_value
    shuffled_draws = pl.Series(_draw_from_student(freedom_degrees)).shuffle(seed=zlib.crc32(seed_name.encode()))
    return mean_value + standard_error * shuffled_draws.to_numpy()


@cache
def compute_half_width(freedom_degrees: int, share_beyond: float) -> float:
    """Half the width of an interval of a mean, in standard errors. share_beyond: the share of draws that lie beyond the
    interval on one side."""
    return compute_quantile(_draw_from_student(freedom_degrees), 1 - share_beyond)


def compute_quantile(drawn_values: DrawnValues, share: float) -> float:
    """The quantile of draws, with linear interpolation. share: which quantile, from 0 to 1."""
    quantile_value = pl.Series(drawn_values).quantile(share, "linear")
    assert quantile_value is not None
    return quantile_value


@cache
def _draw_from_student(freedom_degrees: int) -> DrawnValues:
    return np.random.default_rng(SEED).standard_t(freedom_degrees, DRAW_COUNT)


def split_test(test_tree: ast.AST) -> list[ast.expr]:
    """Divide the test of a claim into parts that must all hold: at each `and`, and a chain such as a < b < c into a < b and
    b < c."""
    match test_tree:
        case ast.BoolOp(op=ast.And(), values=values):
            return [part for value in values for part in split_test(value)]
        case ast.Compare(left=left, ops=ops, comparators=others):
            compared_sides = [left, *others]
            return [ast.Compare(compared_sides[index], [op], [compared_sides[index + 1]]) for index, op in enumerate(ops)]
        case ast.expr():
            return [test_tree]
        case _:  # pragma: no cover - the tree of an expression is always an ast.expr
            raise AssertionError(ast.dump(test_tree))


def find_calls(expression_tree: ast.AST) -> dict[str, ast.Call]:
    """All calls in an expression, in the order in which they occur: {text of a call: the call}."""
    call_nodes = [node for node in ast.walk(expression_tree) if isinstance(node, ast.Call)]
    call_nodes.sort(key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))
    return {ast.unparse(node): node for node in call_nodes}


def compute_share(test: ast.expr, value_of_call: Mapping[str, CallValue]) -> float:
    """The share of draws in which a test holds, from 0 to 1.

    value_of_call: {text of a call in the test: its value}. Raises ExpressionError if the expression is not a test or cannot be
    evaluated.
    """
    try:
        with np.errstate(all="ignore"):
            holds_in_draw = DrawsEvaluator(value_of_call).test(test)
    except ZeroDivisionError:
        raise ExpressionError(f"{ast.unparse(test)}: a side is not finite, as after a division by zero") from None
    except (TypeError, OverflowError) as error:
        raise ExpressionError(f"{ast.unparse(test)} cannot be evaluated: {error}") from None
    return int(np.count_nonzero(holds_in_draw)) / np.size(holds_in_draw)


def compute_side_values(test: ast.expr, value_of_call: Mapping[str, CallValue]) -> tuple[float | None, float | None]:
    """The values of the left and the right side of a test that compares numbers; (None, None) for any other test."""
    if not _compares_numbers(test, value_of_call):
        return None, None
    left_value, right_value = (float(DrawsEvaluator(value_of_call).evaluate(side)) for side in (test.left, test.comparators[0]))
    return left_value, right_value


def compute_side_intervals(
    test: ast.expr, value_of_call: Mapping[str, CallValue]
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """The 95 % intervals of the left and the right side of a test that compares numbers; (None, None) for any other test.

    The interval of a side is None if the side does not scatter.
    """
    if not _compares_numbers(test, value_of_call):
        return None, None
    left, right = (_compute_interval(DrawsEvaluator(value_of_call).evaluate(side)) for side in (test.left, test.comparators[0]))
    return left, right


def _compares_numbers(test: ast.expr, value_of_call: Mapping[str, CallValue]) -> TypeGuard[ast.Compare]:
    if not isinstance(test, ast.Compare) or isinstance(test.ops[0], ast.In | ast.NotIn):
        return False
    return not any(isinstance(value, str) for value in value_of_call.values())


def _compute_interval(side_value: float | DrawnValues) -> tuple[float, float] | None:
    if not isinstance(side_value, np.ndarray):
        return None
    low, high = compute_quantile(side_value, 0.025), compute_quantile(side_value, 0.975)
    return None if low == high else (low, high)


class DrawsEvaluator(Evaluator):
    """Evaluates an expression on draws: numbers are floats or arrays of draws, and tests are booleans or arrays of booleans.

    All operands of `and` and `or` are evaluated, even if the first operand decides the result, because every compared number
    must be finite.
    """

    def __init__(self, values: Mapping[str, CallValue]) -> None:
        super().__init__({})
        self.values = values

    def test(self, node: ast.expr) -> Any:
        """The value of a test. Raises ExpressionError if the expression is not a test."""
        test_value = self.evaluate(node)
        if not _is_test(test_value):
            raise ExpressionError(f"{ast.unparse(node)} is not a test: it is neither true nor false")
        return test_value

    def lookup(self, name: str) -> Any:
        """Raise ExpressionError for a plain name, because a metric in a claim must be a call that selects a cell."""
        raise ExpressionError(f"{name} is not a number")

    def call_function(self, node: ast.Call) -> CallValue:
        """The value of a call in the test of a claim. It is looked up by the text of the call."""
        return self.values[ast.unparse(node)]

    def combine_with_and(self, tests: Iterable[Any]) -> Any:
        """In which draws all of these tests hold. Raises TypeError if one of them is not a test."""
        return reduce(np.logical_and, map(_check_test, tests))

    def combine_with_or(self, tests: Iterable[Any]) -> Any:
        """In which draws at least one of these tests holds. Raises TypeError if one of them is not a test."""
        return reduce(np.logical_or, map(_check_test, tests))

    def negate(self, test: Any) -> Any:
        """In which draws the test does not hold."""
        return np.logical_not(_check_test(test))

    def require_number(self, side_value: Any) -> Any:
        """The side of a comparison, unchanged, if it is a number. Raises TypeError if it is a text, a list, a test or None."""
        if isinstance(side_value, str | list | None) or _is_test(side_value):
            raise TypeError("arithmetic needs numbers")
        return side_value

    def compare(self, left_side: Any, operator_node: ast.cmpop, right_side: Any) -> Any:
        """In which draws a comparison holds. Raises TypeError if it compares a text with a number, or if a side is not
        finite."""
        if isinstance(operator_node, ast.In | ast.NotIn):
            if not isinstance(right_side, list):
                raise TypeError("the value after `in` is not a list")
            is_inside = self.combine_with_or([False, *(self.compare(left_side, ast.Eq(), member) for member in right_side)])
            return is_inside if isinstance(operator_node, ast.In) else np.logical_not(is_inside)
        is_text = [isinstance(side, str) for side in (left_side, right_side)]
        if any(is_text) and not (all(is_text) and isinstance(operator_node, ast.Eq | ast.NotEq)):
            raise TypeError("it compares a number with a text, or texts with an operator other than == and !=")
        if not any(is_text) and not all(np.all(np.isfinite(self.require_number(side))) for side in (left_side, right_side)):
            raise TypeError("a side is not finite, as after a division by zero")
        return _COMPARISONS[type(operator_node)](left_side, right_side)


def _is_test(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, np.ndarray) and value.dtype == np.bool_)


def _check_test(test: Any) -> Any:
    if not _is_test(test):
        raise TypeError("a number stands where a test is needed")
    return test
