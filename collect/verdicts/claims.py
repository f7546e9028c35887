"""Judges the claims of a study. Each claim gets a verdict, and the numbers from which the verdict follows."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from collect.findings import comparability
from collect.findings.row import CellRow
from collect.findings.statistics import ERROR_LEVEL, LEAST_REPEATS
from collect.reading.load import LoadedMatrix
from collect.verdicts import draws, part_text, reasons
from collect.verdicts.draws import CallValue
from collect.verdicts.selection import STATE_METRIC, Measurements, NoMeasurement
from collect.verdicts.uncertain_number import UncertainNumber
from shardlab.matrix import cell_names, matrix
from shardlab.matrix.expansion import Expansion
from shardlab.matrix.expression import MAX_LENGTH, Expression, ExpressionError
from shardlab.matrix.study import Claim

VerdictWord = Literal["reproduced", "contradicted", "undecided", "ambiguous", "not run"]


class ClaimNumber(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A number that the verdict on a claim uses."""

    call: str
    """The metric and the cell in the words of the test of the claim."""
    cell: str
    """The id of the cell."""
    value: float | str
    """The mean of the metric in this cell, or the state of the cell."""
    unit: str = ""
    """Unit of `value`, `low` and `high`; empty: no unit."""
    low: float | None = None
    """The lower end of the 95 % interval, if it is known."""
    high: float | None = None
    """The upper end of the 95 % interval, if it is known."""
    n: int = 0
    """The number of repeats."""
    how: str = ""
    """How the interval was computed, or why there is none."""
    runs: list[str] = []
    """The ids of the runs over which `value` is the mean."""
    against: str = ""
    """The id of the cell with which this cell is compared, if the metric compares two cells."""


class ClaimPart(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A part of the test of a claim, such as one comparison. The claim holds if all of its parts hold."""

    test: str
    """The part as text."""
    holds: bool
    """Whether the part holds for the measured means."""
    left: float | None = None
    """The measured value of the left side."""
    right: float | None = None
    """The measured value of the right side."""
    left_interval: tuple[float, float] | None = None
    """The 95 % interval of the left side; absent for a constant, and if the scatter is not known."""
    right_interval: tuple[float, float] | None = None
    """The 95 % interval of the right side; absent for a constant, and if the scatter is not known."""
    left_unit: str = ""
    """The unit of the left side; absent if it has no unit or its unit is not known."""
    right_unit: str = ""
    """The unit of the right side; absent if it has no unit or its unit is not known."""
    holds_pct: float | None = None
    """The percentage of draws in which the part holds; absent if the scatter is not known."""


class Verdict(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The verdict on one claim of a study."""

    id: str
    """The id of the claim in the matrix file."""
    says: str
    """The sentence of the claim."""
    where: str
    """The place of the claim in the study."""
    quote: str = ""
    """The claim in the words of the study; absent if the matrix file has no quote."""
    test: str
    """The test of the claim."""
    verdict: VerdictWord
    """The verdict, in one word or two."""
    why: str
    """The reason for the verdict, in a sentence."""
    numbers: list[ClaimNumber] = []
    """The measured numbers that the verdict uses."""
    parts: list[ClaimPart] = []
    """The parts of the test."""
    remarks: list[str] = []
    """Sentences that a reader needs to judge the verdict."""
    reasons: list[str] = []
    """Possible reasons why the measured numbers differ from the numbers of the study."""
    notes: list[str] = []
    """The notes of the matrix on the same place in the study."""
    helps: str = ""
    """The command that is likely to decide the claim, if it is undecided."""
    rehearsal: bool = False
    """Whether the runs were a rehearsal, which says nothing about speed and size."""
    illustrative: bool = False
    """Whether the study measured nothing itself."""


def judge_claims(loaded: LoadedMatrix, measurements: Measurements) -> list[Verdict]:
    """Judge every claim of the matrix, in the order of the matrix.

    The test of a claim is divided into parts at each `and`. It is evaluated on random draws of the means (the errors of the
    means follow Student's t).

    - reproduced: every part holds in at least 97.5 % of the draws. Because all parts must hold, no correction for several tests
      is needed (Berger, 1982).
    - contradicted: at least one part holds in at most 2.5 % / (number of parts) of the draws (Bonferroni correction).
    - undecided: all other cases.
    """
    illustrative = is_illustrative(loaded)
    return [_judge_claim(loaded, measurements, claim, illustrative) for claim in loaded.expansion.claims]


def is_illustrative(loaded: LoadedMatrix) -> bool:
    """Whether the study prints numbers, but measured none of these numbers itself."""
    number_kinds = {entry.kind for entry in loaded.expansion.reported}
    return bool(number_kinds) and "measured" not in number_kinds


def _judge_claim(loaded: LoadedMatrix, measurements: Measurements, claim: Claim, illustrative: bool) -> Verdict:
    verdict = Verdict(
        id=claim.id,
        says=claim.says,
        where=claim.where,
        quote=claim.quote,
        test=claim.test,
        verdict="not run",
        why="",
        remarks=reasons.list_adaptation_clauses(claim),
        notes=reasons.find_notes_at(loaded, claim.where),
        illustrative=illustrative,
    )
    try:
        test_tree = Expression(claim.test).syntax_tree
        value_of_call, number_of_call = _look_up_numbers(measurements, verdict, test_tree)
    except ExpressionError as error:
        verdict.why = str(error)
        return verdict
    except _Unanswerable as unanswered:
        verdict.verdict, verdict.why = unanswered.verdict, unanswered.why
        return verdict
    row_of_cell = {row.id: row for row in measurements.rows}
    claim_rows = [row_of_cell[cell] for cell in dict.fromkeys(claim_number.cell for claim_number in verdict.numbers)]
    verdict.rehearsal = any(reasons.explain_rehearsal(measurements.cell(row)) for row in claim_rows)
    try:
        _decide_verdict(verdict, test_tree, value_of_call)
    except ExpressionError as error:
        verdict.verdict, verdict.why = "undecided", f"{error}"
    selected_parts = [part for number in number_of_call.values() for part in number.selected.parts]
    step_metric_parts = [part for part in selected_parts if part.metric.of_all_steps]
    if comparability.have_different_instruments(part.row.cell for part in step_metric_parts):
        metric_names = ", ".join(dict.fromkeys(part.metric.name for part in step_metric_parts))
        verdict.remarks.append(
            f"the cells have different instruments, and {metric_names} includes the steps that these slowed down"
        )
    loaded_cells = [measurements.cell(row) for row in claim_rows]
    remarks = (
        comparability.describe_precision_difference([cell.cell for cell in loaded_cells]),
        comparability.describe_sync_of_cells(loaded_cells),
    )
    verdict.remarks += filter(None, remarks)
    host_reasons = (reasons.explain_uncounted_traffic(measurements.cell(part.row), part.metric.name) for part in selected_parts)
    if network_reason := next(filter(None, host_reasons), ""):
        verdict.verdict, verdict.why = "undecided", network_reason
    elif unproven_reason := _find_unproven_reason(measurements, verdict, test_tree, number_of_call):
        verdict.verdict, verdict.why = "undecided", unproven_reason
    elif verdict.verdict == "undecided" and verdict.parts:
        cell_ids = {cell for claim_number in verdict.numbers for cell in (claim_number.cell, claim_number.against) if cell}
        verdict.helps = make_repeat_command(loaded.expansion, max(claim_number.n for claim_number in verdict.numbers), cell_ids)
    if verdict.verdict == "contradicted":
        metrics = {number.selected.metric.name for number in number_of_call.values()}
        clause_lists = [reasons.list_likely_reasons(loaded, measurements.cell(row), row, metrics) for row in claim_rows]
        verdict.reasons = list(dict.fromkeys(clause for clauses in clause_lists for clause in clauses))
    return verdict


class _Unanswerable(Exception):
    def __init__(self, missing: list[NoMeasurement]) -> None:
        super().__init__()
        verdict_order: tuple[VerdictWord, ...] = ("ambiguous", "not run", "undecided")
        self.verdict: VerdictWord = min((error.verdict for error in missing), key=verdict_order.index)
        self.why = "; ".join(dict.fromkeys(error.why for error in missing if error.verdict == self.verdict))


def _look_up_numbers(
    measurements: Measurements, verdict: Verdict, test_tree: ast.expr
) -> tuple[dict[str, CallValue | None], dict[str, UncertainNumber]]:
    """Look up the value of each call in the test of a claim, and add it to the numbers of the verdict.

    Returns ({text of a call: the draws of its value, or None if they are not known}, {text of a call of a metric: its
    number}). Raises _Unanswerable with all calls that have no value, ExpressionError if a filter is not a constant.
    """
    value_of_call: dict[str, CallValue | None] = {}
    numbers: dict[str, UncertainNumber] = {}
    missing_numbers: list[NoMeasurement] = []
    for call_text, call in draws.find_calls(test_tree).items():
        cell_filter = Expression(call_text).call_arguments[0][1]
        assert isinstance(call.func, ast.Name)
        try:
            if call.func.id == STATE_METRIC:
                row, value_of_call[call_text] = measurements.find_state(cell_filter)
                run_ids = [run.run_id for run in row.runs]
                verdict.numbers.append(ClaimNumber(call=call_text, cell=row.id, value=row.state, n=len(run_ids), runs=run_ids))
                continue
            metric = measurements.metrics.get(call.func.id)
            argument = cell_filter.pop(metric.argument, None) if metric and metric.argument else None
            number = UncertainNumber(measurements, measurements.find_metric(call.func.id, cell_filter, argument))
        except NoMeasurement as unanswered:
            missing_numbers.append(unanswered)
            continue
        numbers[call_text] = number
        value_of_call[call_text] = number.draws
        row = number.selected.row
        verdict.numbers.append(
            ClaimNumber(
                call=call_text,
                cell=row.id,
                value=number.value,
                unit=number.selected.unit,
                low=number.low,
                high=number.high,
                n=number.n,
                how=number.how,
                runs=[run.run_id for part in number.selected.parts for run in part.row.runs if run.state == "completed"],
                against=number.selected.compared_pair[1].row.id if number.selected.compared_pair else "",
            )
        )
    if missing_numbers:
        raise _Unanswerable(missing_numbers)
    return value_of_call, numbers


def _decide_verdict(verdict: Verdict, test_tree: ast.expr, value_of_call: Mapping[str, CallValue | None]) -> None:
    """Evaluate the parts of the test of a claim, and set the verdict.

    value_of_call: {text of a call in the test: the draws of its value, or None if they are not known}. Raises ExpressionError
    if the test cannot be evaluated."""
    test_parts = draws.split_test(test_tree)
    measured_values: dict[str, CallValue] = {number.call: number.value for number in verdict.numbers}
    known_values = {text: value for text, value in value_of_call.items() if value is not None}
    for test in test_parts:
        part_calls = draws.find_calls(test).keys()
        part = ClaimPart(
            test=ast.unparse(test), holds=draws.compute_share(test, {text: measured_values[text] for text in part_calls}) == 1
        )
        part.left, part.right = draws.compute_side_values(test, {text: measured_values[text] for text in part_calls})
        unit_of_call = {number.call: number.unit for number in verdict.numbers}
        if isinstance(test, ast.Compare):
            sides = (test.left, test.comparators[0])
            part.left_unit, part.right_unit = (_infer_unit(side, unit_of_call) or "" for side in sides)
        if part_calls <= known_values.keys():
            part.holds_pct = 100 * draws.compute_share(test, {text: known_values[text] for text in part_calls})
            part.left_interval, part.right_interval = draws.compute_side_intervals(
                test, {text: known_values[text] for text in part_calls}
            )
        verdict.parts.append(part)
    failing_parts = [
        part for part in verdict.parts if part.holds_pct is not None and part.holds_pct <= 100 * ERROR_LEVEL / len(test_parts)
    ]
    open_parts = [part for part in verdict.parts if part.holds_pct is None or part.holds_pct < 100 * (1 - ERROR_LEVEL)]
    if failing_parts:
        verdict.verdict, verdict.why = "contradicted", "; ".join(part_text.describe_failure(part) for part in failing_parts)
    elif not open_parts:
        least_holds_pct = min((part.holds_pct for part in verdict.parts if part.holds_pct is not None), default=100.0)
        is_exact = all(isinstance(value, float | str) for value in value_of_call.values())
        verdict.verdict = "reproduced"
        verdict.why = (
            "holds; its numbers do not scatter" if is_exact else f"holds in {part_text.format_share(least_holds_pct)} of draws"
        )
    else:
        verdict.verdict = "undecided"
        unknown_reasons = dict.fromkeys(
            number.how for number in verdict.numbers if number.call in value_of_call.keys() - known_values.keys()
        )
        measured_text = "as measured it holds" if all(part.holds for part in verdict.parts) else "as measured it does not hold"
        has_unknown = any(part.holds_pct is None for part in open_parts)
        verdict.why = "; ".join(
            [*unknown_reasons, measured_text] if has_unknown else map(part_text.describe_overlap, open_parts)
        )


def make_repeat_command(expansion: Expansion, repeat_count: int, cell_ids: Collection[str]) -> str:
    """The command that submits more repeats of some cells of a matrix. repeat_count: the present number of repeats. cell_ids:
    ids of the cells.

    The command selects these cells with --where, because --repeats applies to every selected cell, and without --where all
    cells of the matrix are selected.
    """
    shipped_matrices = matrix.find_shipped_matrices()
    matrix_name = expansion.name.removesuffix("-tiny") if expansion.scale == "tiny" else expansion.name
    matrix_option = (
        matrix_name
        if matrix_name in shipped_matrices and shipped_matrices[matrix_name].name == Path(expansion.path).name
        else shlex.quote(expansion.path)
    )
    scale_option = " --scale tiny" if expansion.scale == "tiny" else ""
    cell_expression = _make_cells_expression(expansion, cell_ids)
    where_option = f" --where {shlex.quote(cell_expression)}" if cell_expression else ""
    return f"jobs submit --matrix {matrix_option}{scale_option} --repeats {max(LEAST_REPEATS, 2 * repeat_count)}{where_option}"


def _make_cells_expression(expansion: Expansion, cell_ids: Collection[str]) -> str:
    """An expression for the option --where that selects these cells of the matrix, and as few other cells as possible.

    Returns "" if all cells are meant, or if no such expression was found. The expression contains only names that every cell
    has, because it is an error if an expression contains an option that a cell does not have.
    """
    names_by_cell = {
        entry.id: cell_names.map_cell_values(msgspec.to_builtins(entry.cell.rehearses or entry.cell))
        for entry in expansion.cells
    }
    other_cells = [names for cell, names in names_by_cell.items() if cell not in cell_ids]
    if not other_cells:
        return ""
    common_names = set.intersection(*(set(names) for names in names_by_cell.values()))
    conditions: dict[str, None] = {}
    for cell in names_by_cell:
        if cell in cell_ids:
            conditions[_make_distinguishing_comparisons(names_by_cell[cell], other_cells, sorted(common_names))] = None
    where_expression = " or ".join(conditions)
    return where_expression if len(where_expression) <= MAX_LENGTH and "" not in conditions else ""


def _make_distinguishing_comparisons(
    cell_names: Mapping[str, Any], other_cells: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> str:
    """Comparisons, joined by `and`, that are true for one cell and for as few other cells as is possible with these keys.

    cell_names: the values of the cell by key. other_cells: the values of each other cell. keys: the keys that may be compared.
    """
    chosen_keys: list[str] = []
    remaining_cells = list(other_cells)
    while remaining_cells:
        best_key = min(keys, key=lambda key: sum(other[key] == cell_names[key] for other in remaining_cells))
        still_equal_cells = [other for other in remaining_cells if other[best_key] == cell_names[best_key]]
        if len(still_equal_cells) == len(remaining_cells):
            break
        chosen_keys.append(best_key)
        remaining_cells = still_equal_cells
    return " and ".join(f"{key} == {_format_python_literal(cell_names[key])}" for key in chosen_keys)


def _format_python_literal(value: Any) -> str:
    """A value as a literal of Python. Texts get double quotes where possible: a shell takes these inside of single quotes."""
    return f'"{value}"' if isinstance(value, str) and value.isprintable() and not set('"\\') & set(value) else repr(value)


def _infer_unit(side_node: ast.expr, unit_of_call: Mapping[str, str]) -> str | None:
    """The unit of one side of a comparison; "x" for a ratio, "" for a plain number, None if the unit is not known.

    unit_of_call: {text of a call: unit of its value}.
    """
    match side_node:
        case ast.Call():
            return unit_of_call.get(ast.unparse(side_node))
        case ast.Constant():
            return ""
        case ast.UnaryOp(operand=operand):
            return _infer_unit(operand, unit_of_call)
        case ast.BinOp(left=left, op=op, right=right):
            left_unit, right_unit = _infer_unit(left, unit_of_call), _infer_unit(right, unit_of_call)
            if isinstance(op, ast.Div) and left_unit == right_unit and left_unit:
                return "x"
            if right_unit == "" and not isinstance(op, ast.Pow):
                return left_unit  # the right side is a plain number, which scales or shifts the left side and keeps its unit
            if left_unit == "" and isinstance(op, ast.Mult | ast.Add | ast.Sub):
                return right_unit
            return left_unit if left_unit == right_unit and isinstance(op, ast.Add | ast.Sub) else None
        case _:
            return None


def _find_unproven_reason(
    measurements: Measurements, verdict: Verdict, test_tree: ast.expr, numbers: Mapping[str, UncertainNumber]
) -> str:
    """The reason why the cells that a part of a claim compares must not be ranked; "" if they may be ranked.

    Cells are not ranked if they do other work (found by the same-work proof, or by design), if no proof shows that their work
    is the same, or if their GPUs were shared, throttled or faulty. Only what the training reached may be compared with that of
    other work by design.
    """
    row_of_cell: dict[str, CellRow] = {}
    cost_cell_ids = set()  # ids of cells of which something else is compared than what the training reached
    for test in draws.split_test(test_tree):
        selections = [part for call in draws.find_calls(test) if call in numbers for part in numbers[call].selected.parts]
        compared_parts = [part for part in selections if not part.metric.exact]
        if len({part.row.id for part in compared_parts}) > 1:
            row_of_cell |= {part.row.id: part.row for part in compared_parts}
            cost_cell_ids |= {part.row.id for part in compared_parts if not part.metric.of_training}
    unproven_texts, unprovable_texts = [], []
    for row in row_of_cell.values():
        proof = row.same_work
        proof_text = (
            f"{measurements.label(row)}: {proof.verdict} ({proof.why})" if proof else f"{measurements.label(row)}: no proof"
        )
        if row.gpu_trouble:
            return f"not ranked, because GPUs were shared, throttled or faulty while steps were timed ({row.gpu_trouble})"
        if not row.is_ranked and (row.id in cost_cell_ids or proof is None or proof.verdict != "other work"):
            unproven_texts.append(proof_text)
        elif proof and proof.verdict != "proven":
            unprovable_texts.append(proof_text)
    if unprovable_texts:
        verdict.remarks.append(f"compares cells that are not proven to do the same work: {'; '.join(unprovable_texts)}")
    if not unproven_texts:
        return ""
    return f"not ranked, because the cells are not known to do the same work: {'; '.join(unproven_texts)}"
