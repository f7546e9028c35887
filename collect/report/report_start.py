"""The text at the start of a report, for a reader with ten seconds: the verdict on each claim, and which strategy to choose."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import msgspec

from collect import notation
from collect.choices.contest import Contest
from collect.choices.standing import Standing
from collect.metric import menu
from collect.report import choice_text
from collect.report.choice_text import Said
from collect.summary import Summary
from collect.verdicts.claims import ClaimPart, Verdict
from collect.verdicts.reasons import places

MARKS = {"reproduced": "✓", "contradicted": "✗", "undecided": "?", "ambiguous": "?", "not run": "–"}
MOST_PRINTED = 2  # printed numbers beside one claim
MOST_CHOICES = 3  # workloads whose choice is told at the start
LONGEST_REASON = 90  # characters; the whole sentence folds out
_AT_LEAST = {ast.GtE: "at least", ast.Gt: "more than"}
_AT_MOST = {ast.LtE: "at most", ast.Lt: "less than"}
_OTHER = {ast.Eq: "exactly", ast.NotEq: "not"}
_TURNED = {ast.GtE: ast.LtE, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.Lt: ast.Gt, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}


class ClaimLine(msgspec.Struct, frozen=True):
    """A claim in one line.

    mark: a symbol for its verdict. printed: the number that the study prints; asked: the bounds that the test sets for the
    measured number. measured, interval: the measured number; against: the number that it is compared with, if that was measured
    too. reason: the reason for the verdict, in few words.
    """

    mark: str
    printed: str
    asked: str
    measured: str
    interval: str
    against: str
    reason: str


class Choice(msgspec.Struct, frozen=True):
    """What to choose for a workload. where: the ranks and the batch; best: (criterion, answer)."""

    workload: str
    where: str
    best: list[tuple[str, Said]]


def claim(verdict: Verdict, summary: Summary) -> ClaimLine:
    """The line of one verdict, from the part of its test that decides it."""
    part = _deciding(verdict)
    measured, interval, against = _sides(part) if part else ("", "", "")
    asked = _asked(verdict, part) if part else ""
    reason = _reason(verdict, part)
    return ClaimLine(MARKS[verdict.verdict], _printed(verdict, summary), asked, measured, interval, against, reason)


def compared(summary: Summary) -> str:
    """`single, ddp and fsdp2 on gpt2-tiny and vit-tiny; 1 and 2 ranks; 3 runs of each cell`."""
    cells = [row.cell for row in summary.rows]
    named = [
        f"{_joined(cell['strategy'] for cell in cells)} on {_joined(cell['workload'] for cell in cells)}",
        f"{_joined(sorted({cell['gpus'] for cell in cells}))} rank{'' if {cell['gpus'] for cell in cells} == {1} else 's'}",
    ]
    counts = sorted({row.n for row in summary.rows})
    if counts and counts != [0]:
        several = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        named.append(f"{several} completed run{'' if counts == [1] else 's'} of each cell")
    return "; ".join(named)


def same_work(summary: Summary) -> str:
    """`8 of 8 cells are proven to do the same work as one process`; nothing if no cell was proven or refuted."""
    proofs = [row.same_work.verdict for row in summary.rows if row.same_work]
    if not proofs:
        return ""
    return f"{proofs.count('proven')} of {len(summary.rows)} cells are proven to do the same work as one process"


def helps(summary: Summary) -> list[str]:
    """The commands that are likely to decide what is undecided."""
    return list(dict.fromkeys(verdict.helps for verdict in summary.verdicts if verdict.helps))


def choices(summary: Summary) -> list[Choice]:
    """Of each workload with a choice: the contest of most cells, on the most ranks and nodes, by all criteria that rank it."""
    found = []
    for family in choice_text.opened(summary)[:MOST_CHOICES]:
        contest = max(
            (contest for contest in family.contests if contest.open),
            key=lambda contest: (len(contest.named("measured")), contest.ranks, contest.nodes, contest.batch),
        )
        best = [(choice_text.HEADINGS[one.criterion], _chosen(contest, one)) for one in contest.standings]
        if best:
            found.append(Choice(choice_text.title(family), choice_text.where(contest), best))
    return found


def _chosen(contest: Contest, standing: Standing) -> Said:
    """Who is the best by a criterion; of many that cannot be told apart, their number."""
    told = choice_text.said(contest, standing.criterion)
    if standing.word == "not told apart" and len(standing.best) > choice_text.MOST_NAMED:
        about = f"{len(standing.best)} of {len(standing.placed)} cannot be distinguished: {told.value}"
        return Said([], "no clear winner", about)
    return told


def _deciding(verdict: Verdict) -> ClaimPart | None:
    """The part that holds in the fewest draws; if draws are not known, the first that does not hold as measured."""
    if not verdict.parts:
        return None
    return min(verdict.parts, key=lambda part: 100.0 * part.holds if part.holds_pct is None else part.holds_pct)


def _sides(part: ClaimPart) -> tuple[str, str, str]:
    """(measured, its interval, what it is compared with if that was measured too)."""
    test = _comparison(part.test)
    if part.left is None or part.right is None or test is None:
        return "", "", ""
    left = (part.left, part.left_interval, part.left_unit)
    right = (part.right, part.right_interval, part.right_unit)
    if not _is_measured(test.left):
        left, right = right, left
    measured, interval = _written(*left)
    if not (_is_measured(test.left) and _is_measured(test.comparators[0])):
        return measured, interval, ""
    other, spread = _written(*right)
    return measured, interval, f"{other} ({spread})" if spread else other


def _written(value: float, interval: tuple[float, float] | None, unit: str) -> tuple[str, str]:
    """A number in three digits with its unit, and its interval in the same unit."""
    name, size = {"x": ("×", 1.0)}.get(unit, (unit, 1.0))
    if unit == "bytes":
        largest = max(map(abs, (value, *(interval or ()))))
        name, size = next(
            ((name, size) for name, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if largest >= size), (unit, 1.0)
        )
    low_high = " to ".join(_digits(end / size) for end in interval) if interval else ""
    return f"{_digits(value / size)} {name}".rstrip(), low_high


def _digits(value: float) -> str:
    return notation.number(value, 3).replace("-", "−")


def _asked(verdict: Verdict, part: ClaimPart) -> str:
    """What the test asks of the number: `1.08 to 1.18`, `at least 2`, `more than the other`."""
    test = _comparison(part.test)
    if test is None:
        return ""
    if _is_measured(test.left) and _is_measured(test.comparators[0]):
        return ""
    wanted, unit = _bound(test)[0], part.left_unit or part.right_unit
    unit = "×" if unit == "x" else unit
    bounds = {}
    for one in verdict.parts:
        other = _comparison(one.test)
        if other is not None and (found := _bound(other))[0] == wanted and one.left is not None and one.right is not None:
            bounds[found[1]] = one.right if _is_measured(other.left) else one.left
    shown = {words: f"{value:,g}" for words, value in bounds.items()}
    if shown.keys() == {"at least", "at most"}:
        return f"{shown['at least']} to {shown['at most']} {unit}".rstrip()
    return " and ".join(f"{words} {value} {unit}".rstrip() for words, value in shown.items())


def _bound(test: ast.Compare) -> tuple[str, str]:
    """(the measured side, how the other side bounds it)."""
    measured_left = _is_measured(test.left)
    kind = type(test.ops[0])
    words = _AT_LEAST | _AT_MOST | _OTHER
    side = test.left if measured_left else test.comparators[0]
    return ast.unparse(side), words.get(kind if measured_left else _TURNED.get(kind, kind), "")


def _comparison(text: str) -> ast.Compare | None:
    tree = ast.parse(text, mode="eval").body
    return tree if isinstance(tree, ast.Compare) and len(tree.ops) == 1 else None


def _is_measured(side: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(side))


def _printed(verdict: Verdict, summary: Summary) -> str:
    """What the study prints of the same thing in the same place: of a cell of the claim, by a metric of the claim."""
    compares = {metric.name: metric.compares or metric.name for metric in menu()}
    asked = {(number.cell, _metric(number.call)) for number in verdict.numbers}
    wanted = places(verdict.where)
    found = [
        f"{entry.printed} {entry.head}".rstrip()
        for entry in summary.reported
        if entry.row and wanted & places(entry.where) and (entry.row, compares.get(entry.metric, entry.metric)) in asked
    ]
    return ", ".join(dict.fromkeys(found)) if len(set(found)) <= MOST_PRINTED else ""


def _metric(call: str) -> str:
    name = call.partition("(")[0]
    return next((metric.compares or name for metric in menu() if metric.name == name), name)


def _reason(verdict: Verdict, part: ClaimPart | None) -> str:
    """Why, in few words."""
    several = (
        f"in {sum(not one.holds for one in verdict.parts)} of {len(verdict.parts)} parts" if len(verdict.parts) > 1 else ""
    )
    if verdict.verdict == "reproduced" and part is not None:
        return (
            "the same in every repeat"
            if "do not scatter" in verdict.why
            else f"holds in {notation.number(part.holds_pct or 100, 3)} % of draws"
        )
    if verdict.verdict == "contradicted" and part is not None:
        return " ".join(filter(None, ["does not hold", several]))
    if verdict.helps and part is not None:
        if part.holds_pct is not None:
            return f"intervals overlap: holds in {notation.number(part.holds_pct, 2)} % of draws"
        held = "holds" if all(one.holds for one in verdict.parts) else "does not hold"
        return f"n = 1, so no interval; as measured it {held}"
    first = verdict.why.partition("; ")[0]
    return first if len(first) <= LONGEST_REASON else first[: LONGEST_REASON - 1].rstrip() + "…"


def _joined(values: Iterable[object]) -> str:
    """`a, b and c`, each once."""
    names = [str(value) for value in dict.fromkeys(values)]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
