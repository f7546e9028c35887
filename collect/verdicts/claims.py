"""Judges the claims of a study. Each claim gets a verdict, and the numbers from which the verdict follows."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from collect.findings import comparability
from collect.reading.load import Loaded
from collect.verdicts import draws, part_text, reasons
from collect.verdicts.draws import Value
from collect.verdicts.selection import STATE, Measurements, NoMeasurement
from collect.verdicts.uncertain_number import Number
from shardlab.matrix import cell_names, matrix
from shardlab.matrix.expansion import Expansion
from shardlab.matrix.expression import MAX_LENGTH, Expression, ExpressionError
from shardlab.matrix.study import Claim

Word = Literal["reproduced", "contradicted", "undecided", "ambiguous", "not run"]
LEAST_REPEATS = 3  # with this many repeats or more, the interval of a mean is computed from the scatter of these repeats
LEVEL = 0.025  # the probability of error on each side of an interval, as in two-sided 95 % intervals


class ClaimNumber(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A number that the verdict on a claim uses.

    call: the metric and the cell in the words of the test of the claim.
    cell: the id of the cell.
    value: the mean of the metric in this cell, or the state of the cell.
    low, high: the 95 % interval, if it is known.
    n: the number of repeats.
    how: how the interval was computed, or why there is none.
    runs: the ids of the runs over which `value` is the mean.
    against: the id of the cell with which this cell is compared, if the metric compares two cells.
    """

    call: str
    cell: str
    value: float | str
    unit: str = ""  # unit of `value`, `low` and `high`; empty: no unit
    low: float | None = None
    high: float | None = None
    n: int = 0
    how: str = ""
    runs: list[str] = []
    against: str = ""


class ClaimPart(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A part of the test of a claim, such as one comparison. The claim holds if all of its parts hold.

    test: the part as text.
    holds: whether the part holds for the measured means.
    left, right: the measured values of the two sides.
    left_interval, right_interval: their 95 % intervals; absent for a constant, and if the scatter is not known.
    left_unit, right_unit: their units; absent if a side has no unit or its unit is not known.
    holds_pct: the percentage of draws in which the part holds; absent if the scatter is not known.
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
    """The verdict on one claim of a study.

    id, says, where, test: the claim in the matrix file: its id, its sentence, its place in the study, and its test.
    why: the reason for the verdict, in a sentence.
    numbers: the measured numbers that the verdict uses. parts: the parts of the test.
    remarks: sentences that a reader needs to judge the verdict.
    reasons: possible reasons why the measured numbers differ from the numbers of the study.
    notes: the notes of the matrix on the same place in the study.
    helps: the command that is likely to decide the claim, if it is undecided.
    rehearsal: whether the runs were a rehearsal, which says nothing about speed and size.
    illustrative: whether the study measured nothing itself.
    """

    id: str
    says: str
    where: str
    test: str
    verdict: Word  # the verdict, in one word or two
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
    """Judge every claim of the matrix, in the order of the matrix.

    The test of a claim is divided into parts at each `and`. It is evaluated on random draws of the means (the errors of the
    means follow Student's t).

    - reproduced: every part holds in at least 97.5 % of the draws. Because all parts must hold, no correction for several tests
      is needed (Berger, 1982).
    - contradicted: at least one part holds in at most 2.5 % / (number of parts) of the draws (Bonferroni correction).
    - undecided: all other cases.
    """
    illustrative = is_illustrative(loaded)
    return [_judge(loaded, measurements, claim, illustrative) for claim in loaded.expansion.claims]


def is_illustrative(loaded: Loaded) -> bool:
    """Whether the study prints numbers, but measured none of these numbers itself."""
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
        remarks=reasons.adapted(claim),
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
    parts_of_all = [part for number in numbers for part in number.found.parts]
    parts = [part for part in parts_of_all if part.metric.of_all_steps]
    if comparability.instruments_differ(part.row.cell for part in parts):
        names = ", ".join(dict.fromkeys(part.metric.name for part in parts))
        verdict.remarks.append(f"the cells have different instruments, and {names} includes the steps that these slowed down")
    if (said := comparability.different_computation([measurements.cell(row).cell for row in cells])) is not None:
        verdict.remarks.append(said)
    on_one_host = (reasons.one_host(measurements.cell(part.row), part.metric.name) for part in parts_of_all)
    if no_network := next(filter(None, on_one_host), ""):
        verdict.verdict, verdict.why = "undecided", no_network
    elif unproven := _unproven(measurements, verdict, numbers):
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
    """Look up the value of each call in the test of a claim, and add it to the numbers of the verdict.

    Returns ({text of a call: the draws of its value, or None if they are not known}, the numbers of the metrics). Raises
    _Unanswerable with all calls that have no value, ExpressionError if a filter is not a constant.
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
    """Evaluate the parts of the test of a claim, and set the verdict.

    values: {text of a call in the test: the draws of its value, or None if they are not known}. Raises ExpressionError if the
    test cannot be evaluated.
    """
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
        verdict.verdict, verdict.why = "contradicted", "; ".join(part_text.fails(part) for part in failing)
    elif not open_:
        least = min((part.holds_pct for part in verdict.parts if part.holds_pct is not None), default=100.0)
        exact = all(isinstance(value, float | str) for value in values.values())
        verdict.verdict = "reproduced"
        verdict.why = "holds; its numbers do not scatter" if exact else f"holds in {part_text.share(least)} of draws"
    else:
        verdict.verdict = "undecided"
        unknown = dict.fromkeys(entered.how for entered in verdict.numbers if entered.call in values.keys() - drawn.keys())
        once = "as measured it holds" if all(part.holds for part in verdict.parts) else "as measured it does not hold"
        is_open = any(part.holds_pct is None for part in open_)
        verdict.why = "; ".join([*unknown, once] if is_open else map(part_text.overlaps, open_))


def more_repeats(expansion: Expansion, n: int, cells: Collection[str]) -> str:
    """The command that submits more repeats of some cells of a matrix. n: the present number of repeats. cells: ids of the
    cells.

    The command selects these cells with --where, because --repeats applies to every selected cell, and without --where all
    cells of the matrix are selected.
    """
    shipped = matrix.shipped()
    name = expansion.name.removesuffix("-tiny") if expansion.scale == "tiny" else expansion.name
    given = name if name in shipped and shipped[name].name == Path(expansion.path).name else shlex.quote(expansion.path)
    scale = " --scale tiny" if expansion.scale == "tiny" else ""
    chosen = _where(expansion, cells)
    where = f" --where {shlex.quote(chosen)}" if chosen else ""
    return f"jobs submit --matrix {given}{scale} --repeats {max(LEAST_REPEATS, 2 * n)}{where}"


def _where(expansion: Expansion, cells: Collection[str]) -> str:
    """An expression for the option --where that selects these cells of the matrix, and as few other cells as possible.

    Returns "" if all cells are meant, or if no such expression was found. The expression contains only names that every cell
    has, because it is an error if an expression contains an option that a cell does not have.
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
    """Comparisons, joined by `and`, that are true for one cell and for as few other cells as is possible with these keys.

    names: the values of the cell by key. others: the values of each other cell. keys: the keys that may be compared.
    """
    kept: list[str] = []
    left = list(others)
    while left:
        best = min(keys, key=lambda key: sum(other[key] == names[key] for other in left))
        still = [other for other in left if other[best] == names[best]]
        if len(still) == len(left):
            break
        kept.append(best)
        left = still
    return " and ".join(f"{key} == {_literal(names[key])}" for key in kept)


def _literal(value: Any) -> str:
    """A value as a literal of Python. Texts get double quotes where possible: a shell takes these inside of single quotes."""
    return f'"{value}"' if isinstance(value, str) and value.isprintable() and not set('"\\') & set(value) else repr(value)


def _sides(test: ast.expr) -> list[ast.expr]:
    return [test.left, test.comparators[0]] if isinstance(test, ast.Compare) else []


def _unit(node: ast.expr, units: Mapping[str, str]) -> str | None:
    """The unit of one side of a comparison; "x" for a ratio, "" for a plain number, None if the unit is not known.

    units: {text of a call: unit of its value}.
    """
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
                return one  # the right side is a plain number, which scales or shifts the left side and keeps its unit
            if one == "" and isinstance(op, ast.Mult | ast.Add | ast.Sub):
                return other
            return one if one == other and isinstance(op, ast.Add | ast.Sub) else None
        case _:
            return None


def _unproven(measurements: Measurements, verdict: Verdict, numbers: list[Number]) -> str:
    """The reason why the cells that a claim compares must not be ranked; "" if they may be ranked.

    Cells are not ranked if they do other work (found by the same-work proof, or by design), if no proof shows that their work
    is the same, or if their GPUs were shared, throttled or faulty.
    """
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
