"""Says in words how a part of a claim's test fails, or why it is open."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from collect import notation

if TYPE_CHECKING:
    from collect.verdicts.claims import ClaimPart


def fails(part: ClaimPart) -> str:
    """The sides of a part that fails, and its test."""
    if part.left is None or part.right is None:
        return f"does not hold: {part.test}"
    unit = part.left_unit or part.right_unit  # a constant of the claim has the unit of the other side
    return f"{_with_unit(part.left, unit)} is not {_words(part.test)} {_with_unit(part.right, unit)}: {part.test}"


def overlaps(part: ClaimPart) -> str:
    """The sides of a part that is open, the share of draws in which it holds, and its test."""
    sides = ""
    if part.left is not None and part.right is not None:
        unit = part.left_unit or part.right_unit
        sides = f"{_with_unit(part.left, unit)} and {_with_unit(part.right, unit)}, "
    return f"intervals overlap ({sides}holds in {share(part.holds_pct or 0)} of draws): {part.test}"


def _with_unit(value: float, unit: str) -> str:
    return f"{notation.number(value)} {'' if unit == 'x' else unit}".rstrip()


def share(pct: float) -> str:
    """A share of draws as text in percent, with one decimal: 10,000 draws do not give more precision."""
    return f"{pct:.1f} %".replace(".0 ", " ")


def _words(test: str) -> str:
    """The operator of the comparison in a part of a test, such as `<`."""
    tree = ast.parse(test, mode="eval").body
    assert isinstance(tree, ast.Compare)
    return {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}[type(tree.ops[0])]
