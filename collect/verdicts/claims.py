"""Judges the claims of a study: each claim gets a verdict and the numbers that the verdict rests on."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from collect import notation
from collect.findings import comparability
from collect.loading.load import Loaded
from collect.verdicts import draws, reasons
from collect.verdicts.draws import Value
from collect.verdicts.selection import STATE, Measurements, NoMeasurement
from collect.verdicts.uncertain_number import ALONE, Number
from shardlab import cell_names, matrix
from shardlab.expansion import Expansion
from shardlab.expression import MAX_LENGTH, Expression, ExpressionError
from shardlab.study import Claim

Word = Literal["reproduced", "contradicted", "undecided", "ambiguous", "not run"]
LEAST_REPEATS = 3  # of which an interval is by their own scatter
LEVEL = 0.025  # of each side: the tests are those of two-sided 95 % intervals


class ClaimNumber(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A number that the verdict on a claim uses.

    call: the metric and the cell, as the test of the claim names them. value: the metric's value in this cell. low, high: the
    95 % interval, if known. against: the cell with which this cell is compared, if the metric compares two cells. how: how the
    interval was computed, or why there is none. runs: the runs whose mean `value` is.
    """

    call: str
    cell: str
    value: float | str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int = 0
    how: str = ""
    runs: list[str] = []
    against: str = ""


class ClaimPart(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One of the tests that a claim says all hold.

    holds: whether it holds for the measured means. left, right: measured values of its sides; left_interval, right_interval:
    their 95 % intervals, absent if the scatter is not known and for constants; left_unit, right_unit: absent if the side has no
    unit or its unit is not known. holds_pct: the share of draws in which it holds; absent if the scatter is not known.
    """

    test: str
    holds: bool
    left: float | None = None
    right: float | None = None
    left_interval: tuple[float, float] | None = None
    right_interval: tuple[float, float] | None = None
    left_unit: str = ""
    right_unit: str = ""
    holds_pct: float | None = None


class Verdict(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One claim.

    why: in a sentence. reasons: why measured and reported may differ. remarks: what a reader has to know of it. helps: the
    command that is likely to decide it. rehearsal: of runs that say nothing of speed or size. illustrative: of a study that ran
    nothing itself.
    """

    id: str
    says: str
    where: str
    test: str
    verdict: Word
    why: str
    numbers: list[ClaimNumber] = []
    parts: list[ClaimPart] = []
    remarks: list[str] = []
    reasons: list[str] = []
    notes: list[str] = []
    helps: str = ""
    rehearsal: bool = False
    illustrative: bool = False


def judge(loaded: Loaded, measurements: Measurements) -> list[Verdict]:
    """The verdict on every claim of the matrix, in its order.

    A test on means of repeats is taken apart at its `and`s. A part holds where it does in 97.5 % of draws of the means (their
    errors are Student's t). All parts have to hold for reproduced (Berger, 1982: then no correction is needed); contradicted
    is a claim of which one part fails in all but 2.5 % / (number of parts) of them (Bonferroni); all else is undecided.
    """
    illustrative = is_illustrative(loaded)
    return [_judge(loaded, measurements, claim, illustrative) for claim in loaded.expansion.claims]


def is_illustrative(loaded: Loaded) -> bool:
    """Whether the study measured none of the numbers that it prints."""
    kinds = {entry.kind for entry in loaded.expansion.reported}
    return bool(kinds) and "measured" not in kinds


def _judge(loaded: Loaded, measurements: Measurements, claim: Claim, illustrative: bool) -> Verdict:
    verdict = Verdict(
        id=claim.id,
        says=claim.says,
        where=claim.where,
        test=claim.test,
        verdict="not run",
        why="",
        notes=reasons.notes(loaded, claim.where),
        illustrative=illustrative,
    )
    try:
        tree = Expression(claim.test).tree
        values, numbers = _enter(measurements, verdict, tree)
    except ExpressionError as error:
        verdict.why = str(error)
        return verdict
    except _Unanswerable as unanswered:
        verdict.verdict, verdict.why = unanswered.verdict, unanswered.why
        return verdict
    rows = {row.id: row for row in measurements.rows}
    cells = [rows[cell] for cell in dict.fromkeys(entered.cell for entered in verdict.numbers)]
    verdict.rehearsal = any(reasons.rehearsal(measurements.cell(row)) for row in cells)
    try:
        _decide(verdict, tree, values)
    except ExpressionError as error:
        verdict.verdict, verdict.why = "undecided", f"{error}"
    parts = [part for number in numbers for part in number.found.parts if part.metric.of_all_steps]
    if comparability.instruments_differ(part.row.cell for part in parts):
        names = ", ".join(dict.fromkeys(part.metric.name for part in parts))
        verdict.remarks.append(f"the cells have different instruments, and {names} includes the steps that these slowed down")
    if (said := comparability.different_computation([measurements.cell(row).cell for row in cells])) is not None:
        verdict.remarks.append(said)
    if unproven := _unproven(measurements, verdict, numbers):
        verdict.verdict, verdict.why = "undecided", unproven
    elif verdict.verdict == "undecided" and verdict.parts:
        wanted = {cell for entered in verdict.numbers for cell in (entered.cell, entered.against) if cell}
        verdict.helps = more_repeats(loaded.expansion, max(entered.n for entered in verdict.numbers), wanted)
    if verdict.verdict == "contradicted":
        metrics = {number.found.metric.name for number in numbers}
        lists = [reasons.likely(loaded, measurements.cell(row), row, metrics) for row in cells]
        verdict.reasons = list(dict.fromkeys(clause for clauses in lists for clause in clauses))
    return verdict


class _Unanswerable(Exception):
    def __init__(self, found: list[NoMeasurement]) -> None:
        super().__init__()
        order: tuple[Word, ...] = ("ambiguous", "not run", "undecided")
        self.verdict: Word = min((one.verdict for one in found), key=order.index)
        self.why = "; ".join(dict.fromkeys(one.why for one in found if one.verdict == self.verdict))


def _enter(measurements: Measurements, verdict: Verdict, tree: ast.expr) -> tuple[dict[str, Value | None], list[Number]]:
    """Fill the verdict's numbers; (text of each call -> its draws, or None where they are not known; the metrics among them).

    Raises _Unanswerable with everything that has no answer, ExpressionError for a filter that is no constant.
    """
    values: dict[str, Value | None] = {}
    numbers: list[Number] = []
    missing: list[NoMeasurement] = []
    for text, call in draws.calls(tree).items():
        wanted = Expression(text).filters[0][1]
        assert isinstance(call.func, ast.Name)
        try:
            if call.func.id == STATE:
                row, values[text] = measurements.state(wanted)
                ended = [run.run_id for run in row.runs]
                verdict.numbers.append(ClaimNumber(call=text, cell=row.id, value=row.state, n=len(ended), runs=ended))
                continue
            metric = measurements.metrics.get(call.func.id)
            argument = wanted.pop(metric.argument, None) if metric and metric.argument else None
            number = Number(measurements, measurements.find(call.func.id, wanted, argument))
        except NoMeasurement as unanswered:
            missing.append(unanswered)
            continue
        numbers.append(number)
        values[text] = number.draws
        row = number.found.row
        verdict.numbers.append(
            ClaimNumber(
                call=text,
                cell=row.id,
                value=number.value,
                unit=number.found.unit,
                low=number.low,
                high=number.high,
                n=number.n,
                how=number.how,
                runs=[run.run_id for part in number.found.parts for run in part.row.runs if run.state == "completed"],
                against=number.found.beside[1].row.id if number.found.beside else "",
            )
        )
    if missing:
        raise _Unanswerable(missing)
    return values, numbers


def _decide(verdict: Verdict, tree: ast.expr, values: Mapping[str, Value | None]) -> None:
    """Raises ExpressionError for a test that cannot be evaluated."""
    tests = draws.parts(tree)
    measured: dict[str, Value] = {entered.call: entered.value for entered in verdict.numbers}
    drawn = {text: value for text, value in values.items() if value is not None}
    for test in tests:
        mine = draws.calls(test).keys()
        part = ClaimPart(test=ast.unparse(test), holds=draws.share(test, {text: measured[text] for text in mine}) == 1)
        part.left, part.right = draws.sides(test, {text: measured[text] for text in mine})
        units = {entered.call: entered.unit for entered in verdict.numbers}
        if sides := _sides(test):
            part.left_unit, part.right_unit = (_unit(side, units) or "" for side in sides)
        if mine <= drawn.keys():
            part.holds_pct = 100 * draws.share(test, {text: drawn[text] for text in mine})
            part.left_interval, part.right_interval = draws.intervals(test, {text: drawn[text] for text in mine})
        verdict.parts.append(part)
    failing = [part for part in verdict.parts if part.holds_pct is not None and part.holds_pct <= 100 * LEVEL / len(tests)]
    open_ = [part for part in verdict.parts if part.holds_pct is None or part.holds_pct < 100 * (1 - LEVEL)]
    if failing:
        verdict.verdict, verdict.why = "contradicted", "; ".join(_fails(part) for part in failing)
    elif not open_:
        least = min((part.holds_pct for part in verdict.parts if part.holds_pct is not None), default=100.0)
        exact = all(isinstance(value, float | str) for value in values.values())
        verdict.verdict = "reproduced"
        verdict.why = "holds; its numbers do not scatter" if exact else f"holds in {_share(least)} of draws"
    else:
        verdict.verdict = "undecided"
        unknown = [part for part in open_ if part.holds_pct is None]
        once = "as measured it holds" if all(part.holds for part in verdict.parts) else "as measured it does not hold"
        verdict.why = f"{ALONE}; {once}" if unknown else "; ".join(_overlaps(part) for part in open_)


def more_repeats(expansion: Expansion, n: int, cells: Collection[str]) -> str:
    """The command that runs some cells of a matrix more often. n: how often they ran; cells: their ids.

    It names these cells by --where, as --repeats is of every cell that is chosen, also of those that no claim names.
    """
    shipped = matrix.shipped()
    name = expansion.name.removesuffix("-tiny") if expansion.scale == "tiny" else expansion.name
    given = name if name in shipped and shipped[name].name == Path(expansion.path).name else shlex.quote(expansion.path)
    scale = " --scale tiny" if expansion.scale == "tiny" else ""
    chosen = _where(expansion, cells)
    where = f" --where {shlex.quote(chosen)}" if chosen else ""
    return f"jobs submit --matrix {given}{scale} --repeats {max(LEAST_REPEATS, 2 * n)}{where}"


def _where(expansion: Expansion, cells: Collection[str]) -> str:
    """An expression that holds for these cells of the matrix and for as few others as possible; "" where all are meant.

    Only names that every cell has are in it: an expression that names an option which a cell lacks is refused.
    """
    named = {entry.id: cell_names.names(msgspec.to_builtins(entry.cell.rehearses or entry.cell)) for entry in expansion.cells}
    others = [names for cell, names in named.items() if cell not in cells]
    if not others:
        return ""
    common = set.intersection(*(set(names) for names in named.values()))
    parts: dict[str, None] = {}
    for cell in named:
        if cell in cells:
            parts[_apart(named[cell], others, sorted(common))] = None
    text = " or ".join(parts)
    return text if len(text) <= MAX_LENGTH and "" not in parts else ""


def _apart(names: Mapping[str, Any], others: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """A conjunction that is true of `names`, and of as few of the others as these keys can tell apart."""
    kept: list[str] = []
    left = list(others)
    while left:
        best = min(keys, key=lambda key: sum(other[key] == names[key] for other in left))
        still = [other for other in left if other[best] == names[best]]
        if len(still) == len(left):
            break
        kept.append(best)
        left = still
    return " and ".join(f"{key} == {names[key]!r}" for key in kept)


def _sides(test: ast.expr) -> list[ast.expr]:
    return [test.left, test.comparators[0]] if isinstance(test, ast.Compare) else []


def _unit(node: ast.expr, units: Mapping[str, str]) -> str | None:
    """The unit of one side of a test; "x" for a ratio, "" for a plain number, None if it is not known."""
    match node:
        case ast.Call():
            return units.get(ast.unparse(node))
        case ast.Constant():
            return ""
        case ast.UnaryOp(operand=operand):
            return _unit(operand, units)
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _unit(left, units), _unit(right, units)
            if isinstance(op, ast.Div) and one == other and one:
                return "x"
            if other == "" and not isinstance(op, ast.Pow):
                return one  # scaled or shifted by a plain number
            if one == "" and isinstance(op, ast.Mult | ast.Add | ast.Sub):
                return other
            return one if one == other and isinstance(op, ast.Add | ast.Sub) else None
        case _:
            return None


def _fails(part: ClaimPart) -> str:
    if part.left is None or part.right is None:
        return f"does not hold: {part.test}"
    return f"{notation.number(part.left)} is not {_words(part.test)} {notation.number(part.right)}: {part.test}"


def _overlaps(part: ClaimPart) -> str:
    sides = ""
    if part.left is not None and part.right is not None:
        sides = f"{notation.number(part.left)} and {notation.number(part.right)}, "
    return f"intervals overlap ({sides}holds in {_share(part.holds_pct or 0)} of draws): {part.test}"


def _share(pct: float) -> str:
    """Percent with one decimal: of 10,000 draws no more is known."""
    return f"{pct:.1f} %".replace(".0 ", " ")


def _words(test: str) -> str:
    """The comparison of a part."""
    tree = ast.parse(test, mode="eval").body
    assert isinstance(tree, ast.Compare)
    return {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}[type(tree.ops[0])]


def _unproven(measurements: Measurements, verdict: Verdict, numbers: list[Number]) -> str:
    """Why cells that a claim ranks may not be ranked: they do other work (as the proof found, or by design), or there is no
    proof."""
    parts = [part for number in numbers for part in number.found.parts]
    rows = {part.row.id: part.row for part in parts if not part.metric.exact}
    if len(rows) < 2:
        return ""
    unproven, unprovable = [], []
    for row in rows.values():
        proof = row.same_work
        said = f"{measurements.label(row)}: {proof.verdict} ({proof.why})" if proof else f"{measurements.label(row)}: no proof"
        if row.gpu_trouble:
            return f"not ranked, because GPUs were shared, throttled or faulty while steps were timed ({row.gpu_trouble})"
        if not row.is_ranked:
            unproven.append(said)
        elif proof and proof.verdict != "proven":
            unprovable.append(said)
    if unprovable:
        verdict.remarks.append(f"compares cells that are not proven to do the same work: {'; '.join(unprovable)}")
    return f"not ranked, because the cells are not known to do the same work: {'; '.join(unproven)}" if unproven else ""
