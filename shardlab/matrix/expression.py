"""Expressions in the option --where and in `include`, `exclude` and `claims` of a matrix file.

Python's parser parses an expression, and this module evaluates it.

An expression may contain comparisons, ``+ - * /``, ``and or not in``, numbers, text, lists, names, and calls of functions that
the caller allows. Everything else is refused before anything is evaluated.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

MAX_LENGTH = 2000  # the largest allowed number of characters of an expression

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class ExpressionError(ValueError):
    """The expression contains something that is not allowed, or uses a name that does not exist."""


class Expression:
    """A checked expression. names: the names (cell keys) in the expression. calls: the names of the functions that it calls."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise ExpressionError(f"an expression of more than {MAX_LENGTH} characters, which is the limit")
        try:
            self.syntax_tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{text!r} is not an expression: {getattr(error, 'msg', None) or error}") from None
        self.names: set[str] = set()
        self.calls: set[str] = set()
        try:
            _check_node(self.syntax_tree, self.names, self.calls)
        except RecursionError:
            raise ExpressionError("an expression nested too deeply") from None

    @property
    def call_arguments(self) -> list[tuple[str, dict[str, Any]]]:
        """For each function call in the expression: (name of the function, values of its arguments by name).

        Raises ExpressionError for an argument that is not a constant.
        """
        return [
            (node.func.id, {keyword_to_key(k.arg): Evaluator({}).evaluate(k.value) for k in node.keywords if k.arg})
            for node in ast.walk(self.syntax_tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]

    def evaluate(self, values: Mapping[str, Any], function_by_name: Mapping[str, Callable[..., Any]] | None = None) -> Any:
        """The value of the expression. values: the value of each name. function_by_name: the functions that it may call, by
        name.

        Raises only ExpressionError, unless a function raises another exception.
        """
        try:
            return Evaluator(values, function_by_name).evaluate(self.syntax_tree)
        except (TypeError, ZeroDivisionError, OverflowError, RecursionError) as error:
            raise ExpressionError(f"{self.text!r} cannot be evaluated: {error}") from None


def keyword_to_key(keyword: str) -> str:
    """The name of a cell key that a keyword of a call stands for. A keyword cannot contain a dot, so `options__pull_interval`
    stands for `options.pull_interval`."""
    return keyword.replace("__", ".", 1)


def _check_node(node: ast.AST, names: set[str], called_names: set[str]) -> None:
    """Raise ExpressionError if the tree contains a construct that is not allowed.

    names, called_names: the names and the called functions in the tree are added to these sets.
    """
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return
        case ast.Name(id=name):
            names.add(name)
        case ast.Attribute():
            names.add(_parse_dotted_name(node))
        case ast.List(elts=items) | ast.Tuple(elts=items):
            for item in items:
                _check_node(item, names, called_names)
        case ast.BoolOp(values=values):
            for value in values:
                _check_node(value, names, called_names)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            _check_node(operand, names, called_names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check_node(left, names, called_names)
            _check_node(right, names, called_names)
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(op) in _COMPARE for op in ops):
            for part in (left, *rest):
                _check_node(part, names, called_names)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(k.arg for k in keywords):
            called_names.add(name)
            for keyword in keywords:
                _check_node(keyword.value, names, called_names)
        case _:
            raise ExpressionError(
                f"{ast.unparse(node)!r} is not allowed. Allowed: comparisons, + - * /, and, or, not, in, numbers, "
                "text, lists, names of cell keys, and metric functions with named arguments"
            )


def _parse_dotted_name(node: ast.AST) -> str:
    """A name with one dot, such as ``options.bucket_mb``, as text. Raises ExpressionError for any other attribute."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not node.attr.startswith("_"):
        return f"{node.value.id}.{node.attr}"
    raise ExpressionError(f"{ast.unparse(node)!r} is not allowed; a name has at most one dot, as in options.name")


class Evaluator:
    """Evaluates the tree of an expression. `collect.verdicts.draws` has a subclass for values that are arrays of draws."""

    def __init__(self, value_by_name: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.value_by_name = value_by_name
        self.functions = functions or {}

    def evaluate(self, node: ast.AST) -> Any:
        """The value of the part of the tree below `node`. Raises TypeError and ZeroDivisionError as Python does."""
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.Name(id=name):
                return self.lookup(name)
            case ast.Attribute():
                return self.lookup(_parse_dotted_name(node))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.evaluate(item) for item in items]
            case ast.BoolOp(op=op, values=values):
                tests = (self.evaluate(item) for item in values)
                return self.combine_with_and(tests) if isinstance(op, ast.And) else self.combine_with_or(tests)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.negate(self.evaluate(operand))
            case ast.UnaryOp(operand=operand):
                return -self.require_number(self.evaluate(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return _BINARY[type(op)](self.require_number(self.evaluate(left)), self.require_number(self.evaluate(right)))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self.combine_with_and(self._compare_chain(left, ops, others))
            case ast.Call():
                return self.call_function(node)
            case _:  # pragma: no cover - _check refuses every other node
                raise AssertionError(ast.dump(node))

    def combine_with_and(self, tests: Iterable[Any]) -> Any:
        """The value of `TEST and TEST ...`. A test is evaluated only if all earlier tests are true."""
        return all(tests)

    def combine_with_or(self, tests: Iterable[Any]) -> Any:
        """The value of `TEST or TEST ...`. A test is evaluated only if all earlier tests are false."""
        return any(tests)

    def negate(self, test: Any) -> Any:
        """The value of the expression `not TEST`. test: the value of TEST."""
        return not test

    def require_number(self, operand: Any) -> Any:
        """Return an operand of an arithmetic operation. Raises TypeError if the operand is not a number."""
        if not isinstance(operand, int | float):
            raise TypeError("arithmetic needs numbers")
        return operand

    def compare(self, left: Any, op: ast.cmpop, right: Any) -> Any:
        """The result of one comparison, such as `left < right`."""
        return _COMPARE[type(op)](left, right)

    def call_function(self, node: ast.Call) -> Any:
        """The value of a function call. Raises ExpressionError for a function that is not allowed."""
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        if name not in self.functions:
            raise ExpressionError(f"unknown function {name!r}. Allowed: {', '.join(sorted(self.functions)) or 'none here'}")
        return self.functions[name](**{keyword_to_key(k.arg): self.evaluate(k.value) for k in node.keywords if k.arg})

    def _compare_chain(self, left: ast.expr, ops: list[ast.cmpop], operands: list[ast.expr]) -> Iterator[Any]:
        """The results of the comparisons in a chain such as `1 < x < 9`. An operand is evaluated once, and only if needed."""
        left_value = self.evaluate(left)
        for op, operand in zip(ops, operands, strict=True):
            right_value = self.evaluate(operand)
            yield self.compare(left_value, op, right_value)
            left_value = right_value

    def lookup(self, name: str) -> Any:
        """The value of a name. Raises ExpressionError for an unknown name."""
        if name not in self.value_by_name:
            raise ExpressionError(f"unknown name {name!r}. Allowed: {', '.join(sorted(self.value_by_name))}")
        return self.value_by_name[name]
