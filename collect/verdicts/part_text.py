"""Says in words how a part of a claim's test fails, or why it is open."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from shardlab.terminal import notation

if TYPE_CHECKING:
    from collect.verdicts.claims import ClaimPart


def describe_failure(claim_part: ClaimPart) -> str:
    """Why a part is contradicted, such as `101.0 s is not < 90.00 s: train_time_s(strategy='ddp') < 90`."""
    if (side_texts := _describe_sides(claim_part)) is None:
        return f"does not hold: {claim_part.test}"
    return f"{side_texts[0]} is not {_find_operator(claim_part.test)} {side_texts[1]}: {claim_part.test}"


def describe_overlap(claim_part: ClaimPart) -> str:
    """Why a part is undecided: the values of both sides, the share of draws in which the part holds, and its test."""
    side_texts = _describe_sides(claim_part)
    values_text = f"{side_texts[0]} and {side_texts[1]}, " if side_texts else ""
    return f"intervals overlap ({values_text}holds in {format_share(claim_part.holds_pct or 0)} of draws): {claim_part.test}"


def _describe_sides(part: ClaimPart) -> tuple[str, str] | None:
    """The values of the left and the right side of a part, with their unit; None if the part does not compare numbers."""
    if part.left is None or part.right is None:
        return None
    side_unit = part.left_unit or part.right_unit  # a constant of the claim has the unit of the other side
    unit_text = "" if side_unit == "x" else side_unit
    return (
        f"{notation.format_number(part.left)} {unit_text}".rstrip(),
        f"{notation.format_number(part.right)} {unit_text}".rstrip(),
    )


def format_share(share_pct: float) -> str:
    """A share of draws as text in percent, with one decimal: 10,000 draws do not give more precision."""
    return f"{share_pct:.1f} %".replace(".0 ", " ")


def _find_operator(test: str) -> str:
    """The operator of the comparison in a part of a test, such as `<`."""
    comparison = ast.parse(test, mode="eval").body
    assert isinstance(comparison, ast.Compare)
    return {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}[type(comparison.ops[0])]
