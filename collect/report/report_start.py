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
from collect.metric import all_metrics
from collect.report import choice_text
from collect.report.choice_text import ChoiceText
from collect.summary import Summary
from collect.verdicts.claims import ClaimPart, Verdict
from collect.verdicts.reasons import named_places
from shardlab.terminal import notation

MARKS = {"reproduced": "✓", "contradicted": "✗", "undecided": "?", "ambiguous": "?", "not run": "–"}
MOST_PRINTED = 2  # the most numbers of the study that are shown beside one claim
MOST_CHOICES = 3  # the most workloads for which the start of the report says what to choose
LONGEST_REASON = 90  # the most characters of a reason at the start of the report; the rest of the page shows the whole reason
_AT_LEAST = {ast.GtE: "at least", ast.Gt: "more than"}
_AT_MOST = {ast.LtE: "at most", ast.Lt: "less than"}
_OTHER = {ast.Eq: "exactly", ast.NotEq: "not"}
_MIRRORED = {ast.GtE: ast.LtE, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.Lt: ast.Gt, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}


class ClaimLine(msgspec.Struct, frozen=True):
    """A claim of the study in one line."""

    mark: str
    """A symbol for the verdict."""
    printed: str
    """The number that the study prints."""
    asked: str
    """The bounds that the test of the claim sets for the measured number, such as "at least 2"."""
    measured: str
    """The measured number with its unit."""
    interval: str
    """The 95 % interval of the measured number, such as "1.1 to 1.2"."""
    against: str
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
    claim_part = _deciding_part(verdict)
    measured_text, interval, other = _sides_text(claim_part) if claim_part else ("", "", "")
    bounds = _bounds_text(verdict, claim_part) if claim_part else ""
    reason = _reason_text(verdict, claim_part)
    return ClaimLine(MARKS[verdict.verdict], _printed_numbers(verdict, summary), bounds, measured_text, interval, other, reason)


def compared_sentence(summary: Summary) -> str:
    """What a report compares, such as `single and ddp on gpt2-tiny; 1 and 2 ranks; 3 completed runs of each cell`."""
    cells = [row.cell for row in summary.rows]
    gpus = sorted({cell["gpus"] for cell in cells})
    strategies = choice_text.join_names([*dict.fromkeys(row.flat_cell["strategy"] for row in summary.rows)])
    parts = [
        f"{strategies} on {choice_text.join_names([*dict.fromkeys(cell['workload'] for cell in cells)])}",
        f"{choice_text.join_names([*map(str, gpus)])} rank{'' if gpus == [1] else 's'}",
    ]
    counts = sorted({row.n for row in summary.rows})
    if counts and counts != [0]:
        run_count = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        parts.append(f"{run_count} completed run{'' if counts == [1] else 's'} of each cell")
    return "; ".join(parts)


def same_work_sentence(summary: Summary) -> str:
    """A sentence such as `8 of 8 cells are proven to do the same work as one process`; "" if no cell was checked."""
    proofs = [row.same_work.verdict for row in summary.rows if row.same_work]
    if not proofs:
        return ""
    return f"{proofs.count('proven')} of {len(summary.rows)} cells are proven to do the same work as one process"


def compare_commands(summary: Summary) -> list[str]:
    """For each command with several measured cells whose work is not proven to be the same: which of them is the fastest, as a
    sentence. It is no choice, because the cells may do different work."""
    rows = [row for row in summary.rows if row.cell.get("command") and not row.is_ranked and "throughput_per_s" in row.metrics]
    sentences = []
    for workload in dict.fromkeys(row.cell["workload"] for row in rows):
        same_rows = [row for row in rows if row.cell["workload"] == workload]
        fastest, *others = sorted(same_rows, key=lambda row: -row.metrics["throughput_per_s"].value)
        if not others:
            continue
        speed, next_speed = (row.metrics["throughput_per_s"] for row in (fastest, others[0]))
        label = summary.labels_by_cell[fastest.id]
        if all(_is_clearly_below(row.metrics["throughput_per_s"], speed) for row in others):
            text = f"fastest: {label}, {notation.format_number(speed.value)} {speed.unit}"
            text += f", {notation.format_number(100 * (speed.value / next_speed.value - 1), 2)} % faster than the next"
        else:
            text = f"the fastest cell cannot be told: {label} has the highest mean, and intervals of others reach it"
        sentences.append(f"{workload}: {text}. It is not proven that the cells do the same work: compare their losses.")
    return sentences


def _is_clearly_below(estimate: Estimate, other: Estimate) -> bool:
    """Whether the 95 % interval of a mean, above 0, is below that of another; False if one of them has no interval."""
    return estimate.high is not None and other.low is not None and estimate.value > 0 and estimate.high < other.low


def repeat_commands(summary: Summary) -> list[str]:
    """Commands that submit more repeats, and so are likely to decide the claims that are undecided."""
    return list(dict.fromkeys(verdict.helps for verdict in summary.verdicts if verdict.helps))


def best_choices(summary: Summary, tensors: Mapping[str, TensorMemory] = choice_text.NO_TENSORS) -> list[Choice]:
    """What to choose for each workload: the best cells of one contest of the workload, by each criterion.

    tensors: the memory of the tensors of cells, by id. On a CPU, it is the criterion of memory where it is known.

    A contest on several ranks is used if there is one, and of these the contest with the most measured cells. If several
    contests have the same number of measured cells, the contest with the most ranks is used, then with the most nodes, then
    with the largest batch.
    """
    workload_choices = []
    for choice_family in choice_text.shown_families(summary)[:MOST_CHOICES]:
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
        best = [
            (choice_text.HEADINGS[standing.criterion], _standing_text(contest, standing, summary, tensors))
            for standing in contest.standings
        ]
        if best:
            workload_choices.append(Choice(choice_text.family_title(choice_family), choice_text.contest_text(contest), best))
    return workload_choices


def _standing_text(contest: Contest, standing: Standing, summary: Summary, tensors: Mapping[str, TensorMemory]) -> ChoiceText:
    """The best cells of a contest by one criterion, as text. If more than MOST_NAMED cells are best, the text says how many."""
    text = choice_text.best_cells_text(contest, standing.criterion, tensors)
    if text.remark == "cannot be distinguished" and len(standing.best) > choice_text.MOST_NAMED:
        certainty = f"{len(standing.best)} of {len(standing.placed)} cannot be distinguished: {text.value}"
        return ChoiceText([], "no clear winner", certainty)
    if standing.criterion == "throughput_per_s":
        return msgspec.structs.replace(text, reason=winner_reasons.write_reason(contest, summary.reasons))
    return text


def _deciding_part(verdict: Verdict) -> ClaimPart | None:
    """The part of a claim's test that decides the verdict: the part that holds in the smallest share of draws.

    Parts without draws (n = 1) decide nothing but that a claim is undecided. Then the first of them that does not hold for the
    measured means is taken, or else the first of them.
    """
    without_draws = [part for part in verdict.parts if part.holds_pct is None]
    if verdict.verdict == "undecided" and without_draws:
        return min(without_draws, key=lambda part: part.holds)
    with_draws = [part for part in verdict.parts if part.holds_pct is not None]
    return min(with_draws, key=lambda part: part.holds_pct or 0.0, default=None)


def _sides_text(claim_part: ClaimPart) -> tuple[str, str, str]:
    """The measured number of a test and the number on the other side, as text: (measured number, its interval, other number).

    The other number is "" if it was not measured, but is a constant of the claim.
    """
    test = _parse_comparison(claim_part.test)
    if claim_part.left is None or claim_part.right is None or test is None:
        return "", "", ""
    left_side = (claim_part.left, claim_part.left_interval, claim_part.left_unit)
    right = (claim_part.right, claim_part.right_interval, claim_part.right_unit)
    if not _is_measured(test.left):
        left_side, right = right, left_side
    if not (_is_measured(test.left) and _is_measured(test.comparators[0])):
        return *_number_and_interval(*left_side), ""
    measured_text, interval = _number_without_factor(test.left, *left_side)
    other, spread = _number_without_factor(test.comparators[0], *right)
    return measured_text, interval, f"{other} ({spread})" if spread else other


def _number_without_factor(side: ast.expr, value: float, interval: tuple[float, float] | None, unit: str) -> tuple[str, str]:
    """Like `_number_and_interval`. If the test multiplies the number by a constant, the text begins with the constant, such as
    `0.8 × 470 MB`, and the interval is that of the number without the constant."""
    scale, text = _constant_factor(side)
    number, interval_text = _number_and_interval(value / scale, interval and (interval[0] / scale, interval[1] / scale), unit)
    return text + number, interval_text


def _constant_factor(side: ast.expr) -> tuple[float, str]:
    """The positive constant by which a test multiplies the number of this side: (the constant, its text, such as `0.8 × `).

    (1, "") if the side is not a product of a constant and a number.
    """
    match side:
        case (
            ast.BinOp(left=ast.Constant(value=int() | float() as scale), op=ast.Mult())
            | ast.BinOp(op=ast.Mult(), right=ast.Constant(value=int() | float() as scale))
        ) if scale > 0:
            return float(scale), f"{scale:g} × "
        case _:
            return 1.0, ""


def _number_and_interval(value: float, interval: tuple[float, float] | None, unit: str) -> tuple[str, str]:
    """A number and its interval as text: (the number with three digits and its unit, the interval in the same unit).

    The text of the interval is "" if there is no interval.
    """
    name, size = {"x": ("×", 1.0)}.get(unit, (unit, 1.0))
    if unit == "bytes":
        largest = max(map(abs, (value, *(interval or ()))))
        name, size = next(
            ((name, size) for name, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if largest >= size), (unit, 1.0)
        )
    interval_text = " to ".join(_format_digits(bound / size) for bound in interval) if interval else ""
    return f"{_format_digits(value / size)} {name}".rstrip(), interval_text


def _format_digits(value: float) -> str:
    return notation.format_number(value, 3).replace("-", "−")


def _bounds_text(verdict: Verdict, claim_part: ClaimPart) -> str:
    """The bounds that the test of a claim sets for the measured number, such as `1.08 to 1.18` or `at least 2`.

    "" if the test compares two measured numbers, so that it has no fixed bound.
    """
    test = _parse_comparison(claim_part.test)
    if test is None:
        return ""
    if _is_measured(test.left) and _is_measured(test.comparators[0]):
        return ""
    side, unit = _side_and_bound(test)[0], claim_part.left_unit or claim_part.right_unit
    unit = "×" if unit == "x" else unit
    bounds = {}
    for other_part in verdict.parts:
        pair = _parse_comparison(other_part.test)
        if (
            pair is not None
            and (bound := _side_and_bound(pair))[0] == side
            and other_part.left is not None
            and other_part.right is not None
        ):
            bounds[bound[1]] = other_part.right if _is_measured(pair.left) else other_part.left
    bound_texts = {words: f"{value:,g}" for words, value in bounds.items()}
    if bound_texts.keys() == {"at least", "at most"}:
        return f"{bound_texts['at least']} to {bound_texts['at most']} {unit}".rstrip()
    return " and ".join(f"{words} {value} {unit}".rstrip() for words, value in bound_texts.items())


def _side_and_bound(test: ast.Compare) -> tuple[str, str]:
    """Returns (text of the measured side of a test, words for the bound that the other side of the test sets, such as `at
    least`)."""
    is_left_measured = _is_measured(test.left)
    operator = type(test.ops[0])
    bound_words = _AT_LEAST | _AT_MOST | _OTHER
    side = test.left if is_left_measured else test.comparators[0]
    return ast.unparse(side), bound_words.get(operator if is_left_measured else _MIRRORED.get(operator, operator), "")


def _parse_comparison(text: str) -> ast.Compare | None:
    tree = ast.parse(text, mode="eval").body
    return tree if isinstance(tree, ast.Compare) and len(tree.ops) == 1 else None


def _is_measured(side: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(side))


def _printed_numbers(verdict: Verdict, summary: Summary) -> str:
    """The numbers that the study prints for the cells and metrics of a claim, at the place where it makes the claim, as text.

    "" if there is no such number, or if there are more than MOST_PRINTED numbers.
    """
    compared_metrics = {metric.name: metric.compares or metric.name for metric in all_metrics()}
    claimed_metrics = {(number.cell, _compared_metric_name(number.call)) for number in verdict.numbers}
    claim_places = named_places(verdict.where)
    numbers = [
        f"{entry.printed} {entry.head}".rstrip()
        for entry in summary.reported
        if entry.row
        and claim_places & named_places(entry.where)
        and (entry.row, compared_metrics.get(entry.metric, entry.metric)) in claimed_metrics
    ]
    return ", ".join(dict.fromkeys(numbers)) if len(set(numbers)) <= MOST_PRINTED else ""


def _compared_metric_name(call: str) -> str:
    name = call.partition("(")[0]
    return next((metric.compares or name for metric in all_metrics() if metric.name == name), name)


def _reason_text(verdict: Verdict, part: ClaimPart | None) -> str:
    """The reason for a verdict, in few words. part: the part of the test that decides the verdict."""
    failed_parts = (
        f"in {sum(not claim_part.holds for claim_part in verdict.parts)} of {len(verdict.parts)} parts"
        if len(verdict.parts) > 1
        else ""
    )
    if verdict.verdict == "reproduced" and part is not None:
        if "do not scatter" in verdict.why:
            return "the same in every repeat"
        return f"holds in {notation.format_number(part.holds_pct or 100, 3)} % of draws"
    if verdict.verdict == "contradicted" and part is not None:
        return " ".join(filter(None, ["does not hold", failed_parts]))
    if verdict.helps and part is not None:
        if part.holds_pct is not None:
            weakest = f"the weakest of {len(verdict.parts)} parts holds" if len(verdict.parts) > 1 else "holds"
            return f"intervals overlap: {weakest} in {notation.format_number(part.holds_pct, 2)} % of draws"
        holds_text = "holds" if all(claim_part.holds for claim_part in verdict.parts) else "does not hold"
        return f"n = 1, so no interval; as measured it {holds_text}"
    first = verdict.why.partition("; ")[0]
    return first if len(first) <= LONGEST_REASON else first[: LONGEST_REASON - 1].rstrip() + "…"
