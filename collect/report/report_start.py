"""Writes the start of a report, for a reader who has ten seconds: the verdict on each claim, and which strategy to choose."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import msgspec

from collect.choices import winner_reasons
from collect.choices.contest import Contest
from collect.choices.standing import Standing
from collect.figures.memory_parts import TensorMemory
from collect.findings.statistics import Estimate
from collect.metric import load_metrics
from collect.report import choice_text, verdict_text
from collect.report.choice_text import ChoiceText
from collect.summary import Summary
from collect.verdicts.claims import ClaimPart, Verdict
from collect.verdicts.reasons import find_named_places
from shardlab.terminal import notation

SYMBOL_BY_VERDICT = {"reproduced": "✓", "contradicted": "✗", "undecided": "?", "ambiguous": "?", "not run": "–"}
MOST_PRINTED = 2  # the most numbers of the study that are shown beside one claim
MOST_CHOICES = 3  # the most workloads for which the start of the report says what to choose
LONGEST_REASON = 90  # the most characters of a reason at the start of the report; the rest of the page shows the whole reason
_AT_LEAST = {ast.GtE: "at least", ast.Gt: "more than"}
_AT_MOST = {ast.LtE: "at most", ast.Lt: "less than"}
_OTHER = {ast.Eq: "exactly", ast.NotEq: "not"}
_MIRRORED = {ast.GtE: ast.LtE, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.Lt: ast.Gt, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}


class ClaimLine(msgspec.Struct, frozen=True):
    """A claim of the study in one line."""

    symbol: str
    """A symbol for the verdict."""
    printed: str
    """The number that the study prints."""
    bounds: str
    """The bounds that the test of the claim sets for the measured number, such as "at least 2"."""
    measured: str
    """The measured number with its unit."""
    interval: str
    """The 95 % interval of the measured number, such as "1.1 to 1.2"."""
    other_number: str
    """The number on the other side of the test, if this number was measured too; else ""."""
    reason: str
    """The reason for the verdict, in few words."""


class Choice(msgspec.Struct, frozen=True):
    """Which cells to choose for a workload."""

    workload: str
    where: str
    """The number of ranks and the batch size for which the choice holds."""
    best: list[tuple[str, ChoiceText]]
    """A list of (heading of a criterion such as "Fastest", text of the choice by this criterion)."""


def write_claim_line(verdict: Verdict, summary: Summary) -> ClaimLine:
    """Write one claim of the study in one line. The numbers come from the part of the claim's test that decides the verdict."""
    claim_part = _find_deciding_part(verdict)
    measured_text, interval, other_number = _describe_sides(claim_part) if claim_part else ("", "", "")
    bounds_text = _describe_bounds(verdict, claim_part) if claim_part else ""
    reason = _shorten_reason(verdict, claim_part)
    printed = _list_printed_numbers(verdict, summary)
    return ClaimLine(SYMBOL_BY_VERDICT[verdict.verdict], printed, bounds_text, measured_text, interval, other_number, reason)


def describe_comparison(summary: Summary) -> str:
    """What a report compares, such as `single and ddp on gpt2-tiny; 1 and 2 ranks; 3 completed runs of each cell`."""
    row_cells = [row.cell for row in summary.rows]
    rank_counts = sorted({cell["gpus"] for cell in row_cells})
    strategies_text = choice_text.join_names([*dict.fromkeys(row.flat_cell["strategy"] for row in summary.rows)])
    clauses = [
        f"{strategies_text} on {choice_text.join_names([*dict.fromkeys(cell['workload'] for cell in row_cells)])}",
        f"{choice_text.join_names([*map(str, rank_counts)])} rank{'' if rank_counts == [1] else 's'}",
    ]
    repeat_counts = sorted({row.n for row in summary.rows})
    if repeat_counts and repeat_counts != [0]:
        run_count = f"{repeat_counts[0]} to {repeat_counts[-1]}" if len(repeat_counts) > 1 else str(repeat_counts[0])
        clauses.append(f"{run_count} completed run{'' if repeat_counts == [1] else 's'} of each cell")
    return "; ".join(clauses)


def describe_same_work(summary: Summary) -> str:
    """A sentence such as `8 of 8 cells are proven to do the same work as one process`; "" if no cell was checked."""
    proof_verdicts = [row.same_work.verdict for row in summary.rows if row.same_work]
    if not proof_verdicts:
        return ""
    return f"{proof_verdicts.count('proven')} of {len(summary.rows)} cells are proven to do the same work as one process"


def describe_fastest_commands(summary: Summary) -> list[str]:
    """For each command with several measured cells whose work is not proven to be the same: which of them is the fastest, as a
    sentence. It is no choice, because the cells may do different work."""
    rows = [row for row in summary.rows if row.cell.get("command") and not row.is_ranked and "throughput_per_s" in row.metrics]
    sentences = []
    for workload in dict.fromkeys(row.cell["workload"] for row in rows):
        same_rows = [row for row in rows if row.cell["workload"] == workload]
        fastest, *slower_rows = sorted(same_rows, key=lambda row: -row.metrics["throughput_per_s"].value)
        if not slower_rows:
            continue
        fastest_speed, next_speed = (row.metrics["throughput_per_s"] for row in (fastest, slower_rows[0]))
        fastest_label = summary.labels_by_cell[fastest.id]
        if all(_is_clearly_below(row.metrics["throughput_per_s"], fastest_speed) for row in slower_rows):
            text = f"fastest: {fastest_label}, {notation.format_number(fastest_speed.value)} {fastest_speed.unit}"
            text += f", {notation.format_number(100 * (fastest_speed.value / next_speed.value - 1), 2)} % faster than the next"
        else:
            text = f"the fastest cell cannot be told: {fastest_label} has the highest mean, and intervals of others reach it"
        sentences.append(f"{workload}: {text}. It is not proven that the cells do the same work: compare their losses.")
    return sentences


def _is_clearly_below(estimate: Estimate, other: Estimate) -> bool:
    """Whether the 95 % interval of a mean, above 0, is below that of another; False if one of them has no interval."""
    return estimate.high is not None and other.low is not None and estimate.value > 0 and estimate.high < other.low


def list_repeat_commands(summary: Summary) -> list[str]:
    """Commands that submit more repeats, and so are likely to decide the claims that are undecided."""
    return list(dict.fromkeys(verdict.helps for verdict in summary.verdicts if verdict.helps))


def list_best_choices(summary: Summary, tensors: Mapping[str, TensorMemory] = choice_text.NO_TENSORS) -> list[Choice]:
    """What to choose for each workload: the best cells of one contest of the workload, by each criterion.

    tensors: the memory of the tensors of cells, by id. On a CPU, it is the criterion of memory where it is known.

    A contest on several ranks is used if there is one, and of these the contest with the most measured cells. If several
    contests have the same number of measured cells, the contest with the most ranks is used, then with the most nodes, then
    with the largest batch.
    """
    workload_choices = []
    for choice_family in choice_text.select_shown_families(summary)[:MOST_CHOICES]:
        contest = max(
            (contest for contest in choice_family.contests if contest.has_choice),
            key=lambda contest: (
                contest.ranks > 1,
                len(contest.contender_names("measured")),
                contest.ranks,
                contest.nodes,
                contest.batch,
            ),
        )
        best_by_criterion = [
            (choice_text.HEADING_BY_CRITERION[standing.criterion], _describe_best(contest, standing, summary, tensors))
            for standing in contest.standings
        ]
        if best_by_criterion:
            workload_choices.append(
                Choice(choice_text.make_family_title(choice_family), choice_text.name_contest(contest), best_by_criterion)
            )
    return workload_choices


def _describe_best(contest: Contest, standing: Standing, summary: Summary, tensors: Mapping[str, TensorMemory]) -> ChoiceText:
    """The best cells of a contest by one criterion, as text. If more than MOST_NAMED_CELLS are best, the text says how many."""
    best_text = choice_text.describe_best_cells(contest, standing.criterion, tensors)
    if best_text.remark == "cannot be distinguished" and len(standing.best) > choice_text.MOST_NAMED_CELLS:
        certainty = f"{len(standing.best)} of {len(standing.placed)} cannot be distinguished: {best_text.value}"
        return ChoiceText([], "no clear winner", certainty)
    if standing.criterion == "throughput_per_s":
        return msgspec.structs.replace(best_text, reason=winner_reasons.write_reason(contest, summary.reasons))
    return best_text


def _find_deciding_part(verdict: Verdict) -> ClaimPart | None:
    """The part of a claim's test that decides the verdict: the part that holds in the smallest share of draws.

    Parts without draws (n = 1) decide nothing but that a claim is undecided. Then the first of them that does not hold for the
    measured means is taken, or else the first of them.
    """
    parts_without_draws = [part for part in verdict.parts if part.holds_pct is None]
    if verdict.verdict == "undecided" and parts_without_draws:
        return min(parts_without_draws, key=lambda part: part.holds)
    parts_with_draws = [part for part in verdict.parts if part.holds_pct is not None]
    return min(parts_with_draws, key=lambda part: part.holds_pct or 0.0, default=None)


def _describe_sides(claim_part: ClaimPart) -> tuple[str, str, str]:
    """The measured number of a test and the number on the other side, as text: (measured number, its interval, other number).

    The other number is "" if it was not measured, but is a constant of the claim.
    """
    test = _parse_comparison(claim_part.test)
    if claim_part.left is None or claim_part.right is None or test is None:
        return "", "", ""
    left_side = (claim_part.left, claim_part.left_interval, claim_part.left_unit)
    right_side = (claim_part.right, claim_part.right_interval, claim_part.right_unit)
    if not _is_measured(test.left):
        left_side, right_side = right_side, left_side
    if not (_is_measured(test.left) and _is_measured(test.comparators[0])):
        return *_format_measured(*left_side), ""
    measured_text, interval_text = _format_with_factor(test.left, *left_side)
    other_text, other_interval = _format_with_factor(test.comparators[0], *right_side)
    return measured_text, interval_text, f"{other_text} ({other_interval})" if other_interval else other_text


def _format_with_factor(side: ast.expr, value: float, interval: tuple[float, float] | None, unit: str) -> tuple[str, str]:
    """Like `_format_measured`. If the test multiplies the number by a constant, the text begins with the constant,
    such as `0.8 × 470 MB`, and the interval is that of the number without the constant."""
    factor, factor_text = _find_constant_factor(side)
    number, interval_text = _format_measured(value / factor, interval and (interval[0] / factor, interval[1] / factor), unit)
    return factor_text + number, interval_text


def _find_constant_factor(side: ast.expr) -> tuple[float, str]:
    """The positive constant by which a test multiplies the number of this side: (the constant, its text, such as `0.8 × `).

    (1, "") if the side is not a product of a constant and a number.
    """
    match side:
        case (
            ast.BinOp(left=ast.Constant(value=int() | float() as factor), op=ast.Mult())
            | ast.BinOp(op=ast.Mult(), right=ast.Constant(value=int() | float() as factor))
        ) if factor > 0:
            return float(factor), f"{factor:g} × "
        case _:
            return 1.0, ""


def _format_measured(mean_value: float, interval: tuple[float, float] | None, unit: str) -> tuple[str, str]:
    """A number and its interval as text: (the number with three digits and its unit, the interval in the same unit).

    The text of the interval is "" if there is no interval.
    """
    largest = max(map(abs, (mean_value, *(interval or ()))))
    unit_name, size = ("×", 1.0) if unit == "x" else verdict_text.choose_decimal_unit(largest, unit)
    interval_text = " to ".join(_format_digits(bound / size) for bound in interval) if interval else ""
    return f"{_format_digits(mean_value / size)} {unit_name}".rstrip(), interval_text


def _format_digits(value: float) -> str:
    return notation.format_number(value, 3).replace("-", "−")


def _describe_bounds(verdict: Verdict, claim_part: ClaimPart) -> str:
    """The bounds that the test of a claim sets for the measured number, such as `1.08 to 1.18` or `at least 2`.

    "" if the test compares two measured numbers, so that it has no fixed bound.
    """
    test = _parse_comparison(claim_part.test)
    if test is None:
        return ""
    if _is_measured(test.left) and _is_measured(test.comparators[0]):
        return ""
    side, unit = _find_side_and_bound(test)[0], claim_part.left_unit or claim_part.right_unit
    unit = "×" if unit == "x" else unit
    value_by_words = {}
    for other_part in verdict.parts:
        other_test = _parse_comparison(other_part.test)
        if (
            other_test is not None
            and (measured_and_words := _find_side_and_bound(other_test))[0] == side
            and other_part.left is not None
            and other_part.right is not None
        ):
            value_by_words[measured_and_words[1]] = other_part.right if _is_measured(other_test.left) else other_part.left
    bound_texts = {words: f"{value:,g}" for words, value in value_by_words.items()}
    if bound_texts.keys() == {"at least", "at most"}:
        return f"{bound_texts['at least']} to {bound_texts['at most']} {unit}".rstrip()
    return " and ".join(f"{words} {value} {unit}".rstrip() for words, value in bound_texts.items())


def _find_side_and_bound(test: ast.Compare) -> tuple[str, str]:
    """Returns (text of the measured side of a test, words for the bound that the other side of the test sets, such as `at
    least`)."""
    is_left_measured = _is_measured(test.left)
    operator = type(test.ops[0])
    words_by_operator = _AT_LEAST | _AT_MOST | _OTHER
    side = test.left if is_left_measured else test.comparators[0]
    return ast.unparse(side), words_by_operator.get(operator if is_left_measured else _MIRRORED.get(operator, operator), "")


def _parse_comparison(test: str) -> ast.Compare | None:
    expression = ast.parse(test, mode="eval").body
    return expression if isinstance(expression, ast.Compare) and len(expression.ops) == 1 else None


def _is_measured(side: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(side))


def _list_printed_numbers(verdict: Verdict, summary: Summary) -> str:
    """The numbers that the study prints for the cells and metrics of a claim, at the place where it makes the claim, as text.

    "" if there is no such number, or if there are more than MOST_PRINTED numbers.
    """
    compared_metrics = {metric.name: metric.compares or metric.name for metric in load_metrics()}
    claimed_metrics = {(number.cell, _find_compared_metric(number.call)) for number in verdict.numbers}
    claim_places = find_named_places(verdict.where)
    printed_texts = [
        f"{entry.printed} {entry.head}".rstrip()
        for entry in summary.reported
        if entry.row
        and claim_places & find_named_places(entry.where)
        and (entry.row, compared_metrics.get(entry.metric, entry.metric)) in claimed_metrics
    ]
    return ", ".join(dict.fromkeys(printed_texts)) if len(set(printed_texts)) <= MOST_PRINTED else ""


def _find_compared_metric(call: str) -> str:
    metric_name = call.partition("(")[0]
    return next((metric.compares or metric_name for metric in load_metrics() if metric.name == metric_name), metric_name)


def _shorten_reason(verdict: Verdict, deciding_part: ClaimPart | None) -> str:
    """The reason for a verdict, in few words. deciding_part: the part of the test that decides the verdict."""
    failed_parts = (
        f"in {sum(not claim_part.holds for claim_part in verdict.parts)} of {len(verdict.parts)} parts"
        if len(verdict.parts) > 1
        else ""
    )
    if verdict.verdict == "reproduced" and deciding_part is not None:
        if "do not scatter" in verdict.why:
            return "the same in every repeat"
        return f"holds in {notation.format_number(deciding_part.holds_pct or 100, 3)} % of draws"
    if verdict.verdict == "contradicted" and deciding_part is not None:
        return " ".join(filter(None, ["does not hold", failed_parts]))
    if verdict.helps and deciding_part is not None:
        if deciding_part.holds_pct is not None:
            weakest_text = f"the weakest of {len(verdict.parts)} parts holds" if len(verdict.parts) > 1 else "holds"
            return f"intervals overlap: {weakest_text} in {notation.format_number(deciding_part.holds_pct, 2)} % of draws"
        holds_text = "holds" if all(claim_part.holds for claim_part in verdict.parts) else "does not hold"
        return f"n = 1, so no interval; as measured it {holds_text}"
    first_clause = verdict.why.partition("; ")[0]
    return first_clause if len(first_clause) <= LONGEST_REASON else first_clause[: LONGEST_REASON - 1].rstrip() + "…"
