"""Evaluates a test on uncertain numbers: in which share of random draws of the numbers it holds."""

from __future__ import annotations

import ast
import zlib
from collections.abc import Mapping
from functools import cache

import numpy as np
import polars as pl

from shardlab.expression import ExpressionError

DRAWS = 10_000
SEED = 20_260_101  # of every draw: the same records always give the same verdicts
Value = float | str | pl.Series  # of a call: known for certain, the end of a cell, or a series of DRAWS

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv"}


def draws(mean: float, error: float, degrees: int, name: str) -> float | pl.Series:
    """DRAWS random values of an uncertain mean: mean + error * t, where t has Student's distribution with `degrees`.

    Draws of the same name are always the same; draws of different names are independent.
    """
    return mean if error == 0 else mean + error * _student(degrees).shuffle(seed=zlib.crc32(name.encode()))


@cache
def half_width(degrees: int, level: float) -> float:
    """The value that a share `level` of the draws of t exceeds, in standard errors."""
    found = _student(degrees).quantile(1 - level, "linear")
    assert found is not None
    return found


@cache
def _student(degrees: int) -> pl.Series:
    return pl.Series("t", np.random.default_rng(SEED).standard_t(degrees, DRAWS))


def parts(tree: ast.AST) -> list[ast.expr]:
    """The tests that a claim says all hold: those that `and` joins, and each comparison of a chain like a < b < c."""
    match tree:
        case ast.BoolOp(op=ast.And(), values=values):
            return [part for value in values for part in parts(value)]
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [left, *others]
            return [ast.Compare(sides[place], [op], [sides[place + 1]]) for place, op in enumerate(ops)]
        case ast.expr():
            return [tree]
        case _:  # pragma: no cover - an expression's tree is one
            raise AssertionError(ast.dump(tree))


def calls(tree: ast.AST) -> dict[str, ast.Call]:
    """Every call in it, by its text, in the order of the text."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))
    return {ast.unparse(node): node for node in found}


def share(test: ast.expr, values: Mapping[str, Value]) -> float:
    """The share of draws in which a test holds, 0 to 1. Raises ExpressionError for what is no test or has no value."""
    height = DRAWS if any(isinstance(value, pl.Series) for value in values.values()) else 1
    columns = {text: value if isinstance(value, pl.Series) else pl.Series([value] * height) for text, value in values.items()}
    frame = pl.DataFrame({"": pl.Series([True] * height), **columns})
    operands: list[pl.Expr] = []
    try:
        held = frame.select(held=pl.col("") & _test(test, values, operands), known=pl.all_horizontal("", *operands))
    except (pl.exceptions.PolarsError, TypeError) as error:
        raise ExpressionError(f"{ast.unparse(test)} cannot be evaluated: {str(error).splitlines()[0]}") from None
    if not held["known"].all():
        raise ExpressionError(f"{ast.unparse(test)}: a side is not finite, as after a division by zero")
    return int(held["held"].cast(pl.Int64).sum()) / height


def sides(test: ast.expr, values: Mapping[str, Value]) -> tuple[float | None, float | None]:
    """The two numbers that a comparison compares; None, None for any other test."""
    if not isinstance(test, ast.Compare) or any(isinstance(value, str) for value in values.values()):
        return None, None
    if isinstance(test.ops[0], ast.In | ast.NotIn):
        return None, None
    frame = pl.DataFrame({text: [value] for text, value in values.items()} or {"": [0]})
    left, right = (frame.select(_number(side, values).cast(pl.Float64)).item() for side in (test.left, test.comparators[0]))
    return left, right


def intervals(test: ast.expr, values: Mapping[str, Value]) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """The 95 % intervals of the two numbers that a comparison compares; None for a side that does not scatter."""
    if not isinstance(test, ast.Compare) or not any(isinstance(value, pl.Series) for value in values.values()):
        return None, None
    if any(isinstance(value, str) for value in values.values()) or isinstance(test.ops[0], ast.In | ast.NotIn):
        return None, None
    frame = pl.DataFrame({"": pl.Series([0.0] * DRAWS), **{text: _drawn(value) for text, value in values.items()}})
    left, right = (
        _interval(frame.select(side=_number(side, values) + pl.col(""))["side"]) for side in (test.left, test.comparators[0])
    )
    return left, right


def _drawn(value: Value) -> pl.Series:
    return value if isinstance(value, pl.Series) else pl.Series([value] * DRAWS)


def _interval(drawn: pl.Series) -> tuple[float, float] | None:
    low, high = drawn.quantile(0.025, "linear"), drawn.quantile(0.975, "linear")
    return None if low is None or high is None or low == high else (low, high)


def _test(node: ast.expr, values: Mapping[str, Value], operands: list[pl.Expr]) -> pl.Expr:
    match node:
        case ast.BoolOp(op=op, values=inner):
            tests = [_test(one, values, operands) for one in inner]
            return pl.all_horizontal(tests) if isinstance(op, ast.And) else pl.any_horizontal(tests)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_test(operand, values, operands)
        case ast.Constant(value=bool() as known):
            return pl.lit(known)
        case ast.Compare(
            left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[ast.List(elts=items) | ast.Tuple(elts=items)]
        ):
            inside = pl.any_horizontal(_compare(left, ast.Eq(), item, values, operands) for item in items)
            return inside if isinstance(op, ast.In) else ~inside
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [left, *others]
            return pl.all_horizontal(
                _compare(sides[place], op, sides[place + 1], values, operands) for place, op in enumerate(ops)
            )
        case _:
            raise ExpressionError(f"{ast.unparse(node)} is not a test: it is neither true nor false")


def _compare(left: ast.expr, op: ast.cmpop, right: ast.expr, values: Mapping[str, Value], operands: list[pl.Expr]) -> pl.Expr:
    texts = [_is_text(side, values) for side in (left, right)]
    if any(texts) and not (all(texts) and isinstance(op, ast.Eq | ast.NotEq)):
        compared = ast.unparse(ast.Compare(left, [op], [right]))
        raise ExpressionError(f"{compared} compares a number with a text, or texts with an operator other than == and !=")
    one, other = (_number(side, values) for side in (left, right))
    if not any(texts):
        operands += [one.is_finite(), other.is_finite()]
    if type(op) not in _COMPARISONS:
        raise ExpressionError(f"{ast.unparse(right)} is not a list")
    found: pl.Expr = getattr(one, _COMPARISONS[type(op)])(other)
    return found


def _is_text(node: ast.expr, values: Mapping[str, Value]) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(values[ast.unparse(node)], str)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _number(node: ast.expr, values: Mapping[str, Value]) -> pl.Expr:
    match node:
        case ast.Constant(value=int() | float() as known) if not isinstance(known, bool):
            return pl.lit(float(known))
        case ast.Constant(value=str() as text):
            return pl.lit(text)
        case ast.Call():
            return pl.col(ast.unparse(node))
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not _is_text(operand, values):
            return -_number(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if not _is_text(left, values) and not _is_text(right, values):
            found: pl.Expr = getattr(_number(left, values), _ARITHMETIC[type(op)])(_number(right, values))
            return found
        case _:
            raise ExpressionError(f"{ast.unparse(node)} is not a number")
